"""Spans of a run: groups, weight versions, and who watches the scheduler to tell them."""
