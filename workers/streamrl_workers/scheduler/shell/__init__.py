"""What surrounds the pure core: links, effects carried out, task pool, numbers, the loops that own them."""
