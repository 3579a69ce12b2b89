"""Prompts from files: columns of any name, epochs, held-out rows, and clear sentences."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from orbit_cli.errors import ConfigError

ROWS = [{"q": f"{n} + 1 =", "a": n + 1, "level": n % 3} for n in range(20)]
COLUMNS = {"prompt_column": "q", "answer_column": "a"}


@pytest.fixture
def write(tmp_path):
    def write(name, rows):
        file = tmp_path / name
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
        return str(file)

    return write


def text(prompt):
    return prompt.messages[-1]["content"]


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_every_epoch_shows_every_training_row_once_in_its_own_order(make_environment, write, name):
    environment = make_environment("file", path=write(name, ROWS), held_out=4, **COLUMNS)
    epochs = [[environment.train_prompt(16 * e + i) for i in range(16)] for e in range(3)]
    expected = {row["q"] for row in ROWS[:16]}
    assert all({text(p) for p in epoch} == expected for epoch in epochs)
    assert len({tuple(p.id for p in epoch) for epoch in epochs}) == 3
    assert [text(p) for p in environment.eval_prompts(4)] == [row["q"] for row in ROWS[16:]]


def test_order_is_a_function_of_the_seed(make_environment, write):
    path = write("data.jsonl", ROWS)
    ids = [
        [make_environment("file", path=path, seed=seed, **COLUMNS).train_prompt(i).id for i in range(16)]
        for seed in (1, 1, 2)
    ]
    assert ids[0] == ids[1] != ids[2]


def test_prompt_carries_id_answer_and_the_other_columns(make_environment, write):
    environment = make_environment("file", path=write("data.jsonl", ROWS), system_prompt="Add.", **COLUMNS)
    prompt = environment.eval_prompts(1)[0]
    assert prompt.id == "test/eval/16"
    assert (prompt.answer, prompt.metadata) == ("17", {"level": 1})
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    assert environment.step(prompt, ["17"]).grade.correct
    assert not environment.step(prompt, ["16"]).grade.correct


def test_held_out_file_and_duplicates(make_environment, write):
    held_out = write("held_out.jsonl", ROWS[:3] + [{"q": "new", "a": "x"}])
    environment = make_environment("file", path=write("data.jsonl", ROWS), eval_path=held_out, **COLUMNS)
    train = [environment.train_prompt(i) for i in range(17)]
    assert {text(p) for p in train} == {row["q"] for row in ROWS[3:]}  # not those that are held out
    assert len({p.id for p in train + environment.eval_prompts(4)}) == 21


def test_conversations_keep_their_turns_and_their_system_prompt(make_environment, write):
    rows = [
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"}], "answer": "d"},
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "e"}], "answer": "f"},
        {"prompt": [{"role": "user", "content": "g"}], "answer": "h"},
    ]  # fmt: skip
    for name in ("data.jsonl", "data.parquet"):
        environment = make_environment(
            "file", path=write(name, rows), held_out=2, system_prompt="ours", prompt_template="<{prompt}>"
        )
        [first] = [environment.train_prompt(0).messages]
        assert first == [{"role": "system", "content": "ours"}, *rows[0]["prompt"][:2],
                         {"role": "user", "content": "<c>"}]  # fmt: skip
        assert environment.eval_prompts(1)[0].messages == [
            {"role": "system", "content": "own"},
            {"role": "user", "content": "<e>"},
        ]


@pytest.mark.parametrize(
    ("rows", "fields", "said"),
    [
        (ROWS, {"prompt_column": "question", "answer_column": "a"}, "has the columns q, a, level"),
        (ROWS, {"prompt_column": "q", "answer_column": "levels"}, "set environment.answer_column=level$"),
        (ROWS[:5] + [{"q": "?", "a": None}], COLUMNS, "row 5 of .* has no a"),
        (ROWS[:5] + [{"q": 7, "a": 1}], COLUMNS, "row 5 of .* is neither text nor a list"),
        (ROWS[:5] + [{"q": [{"role": "user"}], "a": 1}], COLUMNS, "row 5 of .* is neither text nor a list"),
        (ROWS[:4], COLUMNS, "has 4 rows and evaluation.prompts=4"),
        ([ROWS[0]] * 6, COLUMNS, "nothing is left to train on"),
        ([], COLUMNS, "has no rows"),
        ([[1]], COLUMNS, "line 1 is no JSON object"),
    ],
)
def test_bad_rows_are_one_sentence(make_environment, write, rows, fields, said):
    with pytest.raises(ConfigError, match=said):
        make_environment("file", path=write("data.jsonl", rows), **fields)


def test_bad_files_are_one_sentence(make_environment, write, tmp_path):
    write("data.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"dat.jsonl is no file; .* has data.jsonl"):
        make_environment("file", path=str(tmp_path / "dat.jsonl"))
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(ConfigError, match="must end in .jsonl or .parquet"):
        make_environment("file", path=str(tmp_path / "data.csv"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n{"prompt": \n')
    with pytest.raises(ConfigError, match="line 2 is no JSON"):
        make_environment("file", path=str(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        make_environment("file", path=str(tmp_path / "bad.parquet"))


def test_more_held_out_prompts_than_rows_is_refused(make_environment, write):
    environment = make_environment("file", path=write("data.jsonl", ROWS), held_out=4, **COLUMNS)
    with pytest.raises(ConfigError, match="evaluation.prompts=5 is more than the 4 held-out rows"):
        environment.eval_prompts(5)


def test_a_file_has_no_score_of_its_own(make_environment, write):
    with pytest.raises(ConfigError, match="reward.kind=task scores reasoning-gym tasks only"):
        make_environment("file", path=write("data.jsonl", ROWS), reward="task", **COLUMNS)
