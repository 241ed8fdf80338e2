"""Lines of a stream of bytes, of any length: `readline` gives up at 128 KiB, and an object or a line of a log may be longer."""

from collections.abc import AsyncIterator


async def split_lines(chunks: AsyncIterator[bytes], *, unfinished: bool = True) -> AsyncIterator[bytes]:
    """The lines without their ends. `unfinished`: also what stands behind the last line's end."""
    parts: list[bytes] = []
    async for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join([*parts, line])
            parts = []
        parts.append(rest)
    if unfinished and (last := b"".join(parts)):
        yield last
