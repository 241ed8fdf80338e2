"""From the metrics of a run folder to one self-contained page: data.py reads, charts.py draws, page.py binds."""
