"""Which files of a model go over the wire, in which pieces, and what is refused on arrival."""

from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream import model_files as module
from streamrl_workers.stream.model_files import Arriving, ModelFilesError, model_files, pieces


def make_model(folder: Path) -> Path:
    contents = {
        "config.json": b"{}",
        "tokenizer.json": bytes(range(256)) * 10_000,
        "added/template.jinja": b"{{ x }}",
        "empty.txt": b"",
        "model.safetensors": b"weights",
        "model-00001-of-00002.safetensors": b"weights",
        "model.safetensors.index.json": b"{}",
        "pytorch_model.bin": b"weights",
        "rank.pt": b"weights",
        ".cache/seen.json": b"{}",
    }
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def sent(folder: Path) -> list[pb.ModelFile]:
    return [piece for path in model_files(folder) for piece in pieces(path, directory=folder)]


def test_everything_but_weights_arrives_as_it_was(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    arriving = Arriving(tmp_path / "got")
    stream = sent(model)
    assert max(len(piece.data) for piece in stream) <= 2**20
    for piece in stream:
        arriving.take(piece)
    arriving.end()
    assert arriving.names == ["added/template.jinja", "config.json", "empty.txt", "tokenizer.json"]
    for name in arriving.names:
        assert (tmp_path / "got" / name).read_bytes() == (model / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "got").rglob("*") if p.is_file()) == sorted(
        Path(name).name for name in arriving.names
    )


def test_a_hub_snapshot_is_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "blob")
    assert [piece.data for piece in sent(tmp_path / "model")] == [b"{}"]


def test_damage_is_found(tmp_path: Path) -> None:
    (*whole, last) = sent(make_model(tmp_path / "model"))
    arriving = Arriving(tmp_path / "got")
    for piece in whole:
        arriving.take(piece)
    last.data = last.data[:-1] + bytes([last.data[-1] ^ 1])
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json is not what was announced"):
        arriving.take(last)
    assert not (tmp_path / "got" / "tokenizer.json").exists()


def test_half_a_file_is_no_end(tmp_path: Path) -> None:
    arriving = Arriving(tmp_path / "got")
    for piece in sent(make_model(tmp_path / "model"))[:-1]:
        arriving.take(piece)
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json ended after \d+ of 2560000 bytes"):
        arriving.end()
    with pytest.raises(ModelFilesError, match="no files"):
        Arriving(tmp_path / "nothing").end()


def test_files_do_not_mix(tmp_path: Path) -> None:
    big, small = pb.ModelFile(name="a", size_bytes=2, data=b"1"), pb.ModelFile(name="b", size_bytes=1, data=b"1")
    arriving = Arriving(tmp_path)
    arriving.take(big)
    with pytest.raises(ModelFilesError, match="b came before a was whole"):
        arriving.take(small)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "."])
def test_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    empty = module._digest(b"")
    with pytest.raises(ModelFilesError, match="no relative path"):
        Arriving(tmp_path / "got").take(pb.ModelFile(name=name, hash=empty))


@pytest.mark.parametrize(("bound", "value"), [("MOST_FILE_BYTES", 1000), ("MOST_BYTES", 1000), ("MOST_FILES", 2)])
def test_bounds_hold_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int) -> None:
    stream = sent(make_model(tmp_path / "model"))
    monkeypatch.setattr(module, bound, value)
    with pytest.raises(ModelFilesError):
        sent(tmp_path / "model")
    arriving = Arriving(tmp_path / "got")
    with pytest.raises(ModelFilesError, match="more than"):
        for piece in stream:
            arriving.take(piece)


def test_a_name_of_the_hub_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="is no directory"):
        model_files(tmp_path / "Qwen" / "Qwen3")
