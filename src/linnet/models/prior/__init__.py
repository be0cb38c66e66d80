"""The diffusion prior of DALL-E 2: from the embedding of a text to the embedding of an image."""
