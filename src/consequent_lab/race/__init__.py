"""The race: what the method is worth beside today's optimisers, each with the same number of trials."""
