"""What a GPU does for many layers at once. Each kernel has its plain-torch line elsewhere, and is tested against it."""
