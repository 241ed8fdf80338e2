"""Cut a wheel into parts that a call to a bare device machine can carry: `python benchmarks/gpu_wheel.py WHEEL FOLDER`.

One compressed tar, cut every 50 MiB. On the other side, once all parts are there, into a folder for PYTHONPATH:

    cat FOLDER/part-* | zstd -d --long=31 | tar -x -C SITE      # parts end in .zst
    cat FOLDER/part-* | xz -d | tar -x -C SITE                  # parts end in .xz, where this machine has no zstd

What vLLM runs without is left out: FlashAttention 2 beside 3, and the router.
"""

import argparse
import lzma
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

PART_BYTES = 50 * 2**20
LEFT_OUT = ("*_vllm_fa2_C*", "*router*")


def cut(wheel: Path, folder: Path, *, left_out: tuple[str, ...] = LEFT_OUT, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the parts; returns them in order."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        whole = _compressed(_tar(wheel, Path(scratch), left_out=left_out))
        parts = []
        with whole.open("rb") as file:
            while data := file.read(part_bytes):
                parts.append(folder / f"part-{len(parts):02d}{whole.suffix}")
                parts[-1].write_bytes(data)
    return parts


def _tar(wheel: Path, scratch: Path, *, left_out: tuple[str, ...]) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not any(fnmatch(name, pattern) for pattern in left_out)]
        for name in names:
            archive.extract(name, scratch / "site")
    with tarfile.open(scratch / "site.tar", "w") as tar:
        tar.add(scratch / "site", arcname=".")
    return scratch / "site.tar"


def _compressed(tar: Path) -> Path:
    if (zstd := shutil.which("zstd")) is not None:
        subprocess.run([zstd, "-q", "-19", "--long=31", "-T0", tar], check=True)
        return tar.with_name(f"{tar.name}.zst")
    compressed = tar.with_name(f"{tar.name}.xz")
    with tar.open("rb") as file, lzma.open(compressed, "wb") as into:
        shutil.copyfileobj(file, into)
    return compressed


def main() -> None:
    """Cut, and list the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    for part in cut(args.wheel, args.folder):
        print(f"{part} {part.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
