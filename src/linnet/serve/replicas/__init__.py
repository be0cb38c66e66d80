"""Several engine processes behind one endpoint: each is a whole server on a Unix socket, and the front only passes calls on."""
