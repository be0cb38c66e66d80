"""Sources of data: files, archives, images, benchmark datasets."""
