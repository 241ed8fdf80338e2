"""`streamrl ui`: pages about runs, while they go on and afterwards. catalog.py finds and reads, pages.py shows, command.py serves."""
