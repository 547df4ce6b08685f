"""Models of all kinds against what an unattached copy of them gives, one concern per file."""
