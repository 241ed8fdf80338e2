"""For people: run, validate, explain, report, journal, generate."""
