"""The paper's tables, by simulation with the real code: `python benchmarks/paper.py`. See docs/benchmarks/paper-tables.md."""

from paper.command import main

if __name__ == "__main__":
    main()
