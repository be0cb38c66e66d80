"""The diffusion prior of DALL-E 2, which predicts an image embedding from a text embedding."""
