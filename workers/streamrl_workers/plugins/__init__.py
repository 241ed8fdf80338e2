"""Plug-ins: classes that a job names by `python: {class, options}`, of the user's own or of installed packages.

    kinds.py      the table of kinds: where a job names one, what it must be         load.py      class and checked options
    sources.py    where its code lies, and the code's fingerprint; imports nothing   protocol.py  the names that plug-ins import

Owns how plug-ins are found, checked and identified, alike for every kind. Does not own what a kind does: that is where it is used.
"""
