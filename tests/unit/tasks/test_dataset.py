"""The task dataset: data files and data sets of the hub, read by the package `datasets`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from rljob_api.task import TaskSpec
from rljob_api.task_args import DatasetArgs
from rljob_client.errors import BadInput
from rljob_testing.hub_server import COMMIT, REPOSITORY, served_hub
from rljob_trainer.runtime.run_inputs import data_digest
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.built_in import TaskContext
from rljob_trainer.tasks.dataset import DatasetItems, items

USER = {"role": "user", "content": "1+1"}
ROWS = [{"prompt": f"{n}+1", "answer": str(n + 1), "level": n} for n in range(20)]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def read(directory: Path, path: str, **args: Any) -> DatasetItems:
    given = DatasetArgs.model_validate({"path": path, **args}, by_alias=True, by_name=False)
    return items(given, TaskContext(directory))


def write(directory: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write the rows as a file, in the format of its suffix, or with save_to_disk."""
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(rows)
    save = {".parquet": table.to_parquet, ".jsonl": table.to_json, ".csv": table.to_csv, "": table.save_to_disk}
    save[file.suffix](str(file))
    return file


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.csv", "saved"])
def test_prompts_and_records_come_from_the_rows(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, ROWS)
    found = read(tmp_path, name)
    assert len(found) == 20
    assert found[7].question == "7+1"
    assert found[7].record["level"] == 7
    assert str(found[7].record["answer"]) == "8"  # a CSV file has no text that looks like a number
    parts = [(name, "train[:90%]", 18), (name, "train[15:]", 5), (name, "train[:2]+train[-1:]", 3)]
    assert [len(read(tmp_path, path, split=split)) for path, split, _ in parts] == [size for *_, size in parts]
    assert read(tmp_path, name, split="train[15:]")[0].question == "15+1"


def test_a_directory_or_a_list_of_files_is_one_data_set(tmp_path: Path) -> None:
    write(tmp_path, "folder/train-0.parquet", ROWS[:3])
    write(tmp_path, "folder/train-1.parquet", ROWS[3:8])
    write(tmp_path, "folder/test-0.parquet", ROWS[8:10])
    assert len(read(tmp_path, "folder")) == 8
    assert len(read(tmp_path, "folder", split="test")) == 2
    assert len(read(tmp_path, "parquet", dataFiles=["folder/*.parquet"])) == 10
    assert len(read(tmp_path, "parquet", dataFiles=["folder/train-1.parquet"])) == 5
    splits = datasets.DatasetDict(a=datasets.Dataset.from_list(ROWS[:4]), b=datasets.Dataset.from_list(ROWS[4:]))
    splits.save_to_disk(str(tmp_path / "saved"))
    assert [item.question for item in map(read(tmp_path, "saved", split="b[:2]+a[:1]").__getitem__, range(3))] == [
        "4+1",
        "5+1",
        "0+1",
    ]


def test_rows_of_verl_are_read_as_they_are(tmp_path: Path, chat_tokenizer: Any) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    write(tmp_path, "train.parquet", [row, row | {"prompt": [{"role": "system", "content": "be brief"}, USER]}])
    (tmp_path / "verl_rewards.py").write_text("def same(answer, record):\n    return answer == record['answer']\n")
    args = {"path": "train.parquet", "answerField": "reward_model.ground_truth"}
    spec = TaskSpec.model_validate({"name": "dataset", "args": args, "reward": "verl_rewards:same"})
    task = build_task(spec, chat_tokenizer, 200, tmp_path, seed=0)
    assert task.prompt(0).text == "<bos>user: 1+1<bos>"
    assert task.prompt(1).text == "<bos>system: be brief<bos>user: 1+1<bos>"
    assert task.prompt(0).item == row | {"answer": "2"}


def test_the_rows_stay_on_disk(tmp_path: Path) -> None:
    write(tmp_path, "train.parquet", ROWS)
    found = read(tmp_path, "train.parquet")
    assert found._rows.cache_files, "a table in memory has no files"
    tensors = datasets.Dataset.from_list(ROWS).with_format("numpy")
    tensors.save_to_disk(str(tmp_path / "saved"))
    assert type(read(tmp_path, "saved")[3].record["level"]) is int, "rewards receive Python's own types"


def test_a_change_of_the_rows_is_recognized(tmp_path: Path) -> None:
    write(tmp_path, "train.parquet", ROWS)
    digest = data_digest(read(tmp_path, "train.parquet"))
    assert digest == data_digest(read(tmp_path, "train.parquet"))
    write(tmp_path, "other.parquet", [*ROWS[:-1], ROWS[-1] | {"answer": "0"}])
    assert data_digest(read(tmp_path, "other.parquet")) != digest


def test_the_compared_rows_of_a_large_data_set_are_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "train.parquet", ROWS)
    monkeypatch.setattr("rljob_trainer.tasks.dataset._MOST_COMPARED", 7)
    assert list(read(tmp_path, "train.parquet").compared) == list(range(0, 20, 2))


BAD_ROW: list[dict[str, Any]] = [{"prompt": "a", "answer": "b"}, {"prompt": None, "answer": "b"}]


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("train.parquet", {"split": "test"}, r'Unknown split "test"\. Should be one of \[\'train\'\]'),
        ("train.parquet", {"split": "train[:x"}, "cannot read the data set train.parquet: .*train.:x"),
        ("saved", {"split": "test"}, r'Unknown split "test"\. Should be one of \[\'train\'\]'),
        (
            "train.parquet",
            {"promptField": "text"},
            "found none in the fields prompt, answer, level; write args.promptF",
        ),
        (
            "train.parquet",
            {"answerField": "label"},
            r"column 'label' \(args.answerField\) .*found prompt, answer, level",
        ),
        ("train.parquet", {"promptField": "level"}, "row 0 of the data set .*as text or as a list .*found int"),
        ("train.txt", {}, r"a file that ends with \.parquet, \.json, \.csv, \.arrow, \.jsonl, found .*train\.txt"),
        ("broken.parquet", {}, "cannot read the data set broken.parquet: .*Parquet"),
        ("broken.csv", {}, "cannot read the data set broken.csv: .*[Ee]xpected 1 fields"),
        (
            "./none.parquet",
            {},
            "a file, a directory, or a data set of the hub as org/name, found none in .*/none.parquet",
        ),
        ("folder/none.parquet", {}, "found none in .*/folder/none.parquet; correct the path"),
        ("a/b/c", {}, "a data set of the hub as org/name, found none in .*/a/b/c"),
        ("gsm8k", {}, "a data set of the hub as org/name, found none in .*/gsm8k"),
        (
            "parquet",
            {"dataFiles": ["none-*.parquet"]},
            "cannot read the data set parquet: At least one valid data file must be specified",
        ),
        ("empty", {}, "expected data files in the data set empty, found none"),
    ],
)
def test_an_unusable_data_set_is_refused(path: str, args: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "train.parquet", ROWS)
    write(tmp_path, "saved", ROWS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and more")
    (tmp_path / "broken.csv").write_text("prompt\na\na,b,c\n")
    with pytest.raises(BadInput, match=message):
        read(tmp_path, path, **args)


def test_a_row_without_a_prompt_and_a_data_set_without_rows_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, "train.parquet", BAD_ROW)
    with pytest.raises(BadInput, match=r"row 1 of the data set train.parquet: .*found NoneType \(None\)"):
        read(tmp_path, "train.parquet")[1]
    empty = datasets.Dataset.from_list(ROWS).select([])
    empty.save_to_disk(str(tmp_path / "empty"))
    empty.to_parquet(str(tmp_path / "empty.parquet"))
    with pytest.raises(BadInput, match="cannot read the data set empty: found no rows"):
        read(tmp_path, "empty")
    (tmp_path / "any_reward.py").write_text("def any(answer, record):\n    return 1.0\n")
    for args in ({"path": "empty.parquet"}, {"path": "train.parquet", "split": "train[:0]"}):
        spec = TaskSpec.model_validate({"name": "dataset", "args": args, "reward": "any_reward:any"})
        with pytest.raises(BadInput, match=r"at least one item in the task dataset, found none|corresponds to no data"):
            build_task(spec, tokenizer, 200, tmp_path, seed=0)


def test_the_package_is_named_if_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"needs the package datasets, found none; install rljob-trainer\[data\]"):
        read(tmp_path, "train.parquet")


def test_reading_rows_imports_no_torch(tmp_path: Path) -> None:
    write(tmp_path, "train.parquet", ROWS)
    check = (
        "import sys; from pathlib import Path; from rljob_api.task_args import DatasetArgs; "
        "from rljob_trainer.tasks.dataset import DatasetItems; "
        "rows = DatasetItems(DatasetArgs(path='train.parquet'), Path(sys.argv[1])); "
        "print(rows[3].question); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout == "3+1\n"


# --- the hub ---

READ = """
import sys, time
from pathlib import Path
time.sleep = lambda _seconds: None  # between the retries of huggingface_hub: 23 s
from rljob_api.task_args import DatasetArgs
from rljob_client.errors import RunError
from rljob_trainer.tasks.dataset import DatasetItems
args = DatasetArgs(**dict(each.split("=") for each in sys.argv[2:]))
try:
    rows = DatasetItems(args, Path(sys.argv[1]))
    print(len(rows), rows[0].question)
except RunError as error:
    print(type(error).__name__, error)
"""


def read_from_hub(home: Path, endpoint: str, *args: str, **variables: str) -> str:
    """Output of a process that reads a data set of the hub: huggingface_hub reads its variables once."""
    given = {"HOME": str(home), "HF_HOME": str(home / "hub"), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    given |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60", "HF_HUB_DISABLE_XET": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_DATASETS_CACHE")}
    command = [sys.executable, "-c", READ, str(home), *args]
    done = subprocess.run(command, env=environment | given | variables, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_data_set_of_the_hub_is_downloaded_once(tmp_path: Path) -> None:
    path = f"path={REPOSITORY}"
    write(tmp_path, "files/train-0.parquet", ROWS[:6])
    write(tmp_path, "files/test-0.parquet", ROWS[6:8])
    with served_hub(tmp_path / "files") as hub:
        assert read_from_hub(tmp_path, hub.url, path, "split=test") == "2 6+1"
        assert read_from_hub(tmp_path, hub.url, path, f"revision={COMMIT}", "split=train[4:]") == "2 4+1"
        assert hub.downloads["train-0.parquet"] == 1
        unknown = read_from_hub(tmp_path, hub.url, path, "split=validation")
        assert unknown.startswith("BadInput task.args: cannot read the data set")
        assert "Should be one of ['train', 'test']" in unknown
        assert "BuilderConfig 'hard' not found" in read_from_hub(tmp_path, hub.url, path, "name=hard")
        absent = read_from_hub(tmp_path, hub.url, "path=tests/absent")
        assert absent.startswith(f"BadInput task.args: there is no file or directory {tmp_path}/tests/absent, and")
        assert "the hub has no data set tests/absent" in absent
    assert read_from_hub(tmp_path, "http://127.0.0.1:9", path, "split=test", HF_HUB_OFFLINE="1") == "2 6+1"


def test_a_hub_that_refuses_or_does_not_answer_is_named(tmp_path: Path) -> None:
    path = f"path={REPOSITORY}"
    write(tmp_path, "files/train-0.parquet", ROWS)
    with served_hub(tmp_path / "files", token="hf_right") as hub:
        assert read_from_hub(tmp_path, hub.url, path, HF_TOKEN="hf_right") == "20 0+1"
        refused = read_from_hub(tmp_path, hub.url, path, HF_TOKEN="hf_wrong", HF_HOME=str(tmp_path / "other"))
        assert refused.startswith("BadInput")
        assert "HF_TOKEN (in pods by spec.env)" in refused
        assert "hf_wrong" not in refused
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        unreachable = read_from_hub(tmp_path, hub.url, path, HF_HOME=str(tmp_path / "empty"), **variables)
        assert unreachable.startswith("HubUnreachable task.args: there is no file or directory")
        assert "the hub is not reachable: check the network and HF_HUB_OFFLINE" in unreachable
