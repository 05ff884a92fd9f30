"""HTTP/1.1 server protocol: parsing and limits of a connection, and the ASGI cycle of a request."""
