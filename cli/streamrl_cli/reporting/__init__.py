"""From the metrics of a run folder to one self-contained page: data.py reads, page.py draws and binds."""
