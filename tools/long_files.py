"""List the Python files that are longer than a reader takes in at once. A report: it refuses nothing. Usage: long_files.py"""

import subprocess
import sys
from pathlib import Path

LONG_LINES = 400


def main() -> None:
    """Write a line for each file, the longest first."""
    files = subprocess.check_output(["git", "ls-files", "*.py"], text=True).splitlines()  # noqa: S607 - git of the path
    lengths = {file: len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files if "_pb2" not in file}
    long = sorted(((lines, file) for file, lines in lengths.items() if lines > LONG_LINES), reverse=True)
    sys.stdout.write(f"{len(long)} files have more than {LONG_LINES} lines\n")
    sys.stdout.writelines(f"{lines:6d} {file}\n" for lines, file in long)


if __name__ == "__main__":
    main()
