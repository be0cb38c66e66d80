"""Generation of text, images and embeddings from a trained run."""
