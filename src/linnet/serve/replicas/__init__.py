"""Several engine processes behind one endpoint: each is a complete server on a Unix socket, and the front is a reverse proxy."""
