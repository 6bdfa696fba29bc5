"""What is said when a stopped run cannot be gone on with."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from dear_serve.errors import ConfigError, DataError, DearError
from training.experiment import Options, run
from training.resume import check_resumed, describe


@pytest.fixture
def stopped(train_set, tmp_path):
    """Pictures of one's own and a run on them, stopped after its first step."""
    folder = shutil.copytree(train_set.pictures, tmp_path / "noise")
    (folder / "val" / "red_fox").mkdir(parents=True)
    shutil.copy(folder / "test/red_fox/0.png", folder / "val/red_fox/v.png")
    (folder / "test/red_fox/0.png").unlink()
    config = replace(train_set.config, shots=0, epochs=2)
    options = Options(out=tmp_path / "b", resume=True)
    with pytest.raises(DearError, match="stopped after step 1"):
        run(folder, config, options, should_stop=lambda: any((tmp_path / ".b.state").glob("*.json")))
    return folder, config, options


def refused(folder, config, options):
    with pytest.raises(ConfigError) as raised:
        run(folder, config, options)
    assert raised.value.field == "resume"
    return raised.value.message


def test_options_are_named_with_both_values(stopped):
    folder, config, options = stopped
    message = refused(folder, replace(config, lr=0.1, dear=replace(config.dear, beta=0.5)), options)
    assert "lr was 0.001 and is 0.1; dear.beta was 0.9 and is 0.5. Put that back" in message


def test_pictures_are_named(stopped):
    folder, config, options = stopped
    changed, gone = folder / "train/red_fox/0.png", folder / "train/blue_cup/1.png"
    shutil.copy(folder / "test/red_fox/1.png", changed)
    gone.rename(folder / "train/grey_stone/9.png")  # to another class: gone here and new there
    shutil.copy(folder / "test/red_fox/1.png", folder / "val/red_fox/v.png")
    message = refused(folder, config, options)
    assert f"1 training pictures changed: {changed}" in message
    assert f"1 training pictures no longer there: {gone}" in message
    assert f"1 training pictures new: {folder}/train/grey_stone/9.png" in message
    assert f"1 validation pictures changed: {folder}/val/red_fox/v.png" in message


def test_test_lists_and_class_names_are_compared(stopped):
    folder, config, options = stopped
    (folder / "test/red_fox/1.png").unlink()
    assert "the test list 'all' has changed" in refused(folder, config, options)
    for split in ("train", "val", "test"):
        (folder / split / "red_fox").rename(folder / split / "red_dog")
    message = refused(folder, config, options)
    assert "red fox and are blue cup, green tree, grey stone, red dog" in message


def test_a_moved_data_set_is_the_same(stopped, tmp_path):
    folder, config, options = stopped
    run(folder.rename(tmp_path / "moved"), config, options)
    assert options.out.is_dir()


def test_other_roles_are_another_run(stopped):
    folder, config, options = stopped
    message = refused(folder, replace(config, roles="mixed"), options)
    assert "roles.heads was" in message
    assert len(message) < 600


def test_order_and_base(train_set, task, tmp_path):
    hashes = {item.path: bytes([i]) * 32 for i, item in enumerate(task.train)}
    file = tmp_path / "new" / "s.json"
    check_resumed(file, {"base weights": "a"}, describe(task, hashes))
    check_resumed(file, {"base weights": "a"}, describe(task, hashes))
    turned = replace(task, train=task.train[::-1])
    with pytest.raises(ConfigError, match="the training pictures are in another order"):
        check_resumed(file, {"base weights": "a"}, describe(turned, hashes))
    with pytest.raises(ConfigError, match='base weights was "a" and is "b"'):
        check_resumed(file, {"base weights": "b"}, describe(task, hashes))


@pytest.mark.parametrize("text", ["", "[]", '{"identity": {}}'])
def test_a_broken_record_is_refused(task, tmp_path, text):
    file = tmp_path / "s.json"
    file.write_text(text)
    hashes = {item.path: b"" for item in task.train}
    with pytest.raises(ConfigError, match="start again without --resume"):
        check_resumed(file, {}, describe(task, hashes))


def test_a_place_that_cannot_be_written_is_named(task, tmp_path):
    (tmp_path / "file").write_text("")
    hashes = {item.path: b"" for item in task.train}
    with pytest.raises(DataError, match=r"s\.json cannot be written \(File exists\)"):
        check_resumed(tmp_path / "file" / "s.json", {}, describe(task, hashes))
