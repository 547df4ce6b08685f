"""Several ranks that train one model: what they say to each other, and what crosses between them."""
