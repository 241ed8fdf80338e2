"""Debian's Chromium, as tests and benchmarks of pages start it: as root, and without a word to anybody else."""

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
