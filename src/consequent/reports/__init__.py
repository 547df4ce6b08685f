"""What users are told: errors, warnings, counters, listings."""
