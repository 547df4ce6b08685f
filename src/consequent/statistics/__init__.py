"""What is kept of a weight's inputs until they are solved with."""
