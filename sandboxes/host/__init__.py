"""The server inside a sandbox: runs environment code and its tools, one episode per slot."""
