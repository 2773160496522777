"""A mistake in YAML is named as what it is, with its line and its correction."""

from __future__ import annotations

import itertools

import pytest
import yaml

from rljob_api.manifest.yaml_document import explain, read_documents


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('a: 1\npattern: "(-?\\d+)"\n', 2, r"\d is not an escape sequence in double quotes: use single quotes"),
        ('pattern: "\\xyz"\n', 1, r"\x, \u and \U in double quotes require hexadecimal digits"),
        ('a: 1\nb: "two\nc: 3\n', 2, "the quotation mark that opens here is not closed"),
        ("a: 1\nb: 'two\nc: 3\n", 2, "the quotation mark that opens here is not closed"),
        ("a: 'don't'\nb: 1\n", 1, "ends at its apostrophe: write '' for an apostrophe"),
        ('a: "say "hi" now"\nb: 1\n', 1, "ends at its second quotation mark"),
        ("a:\n\tb: 2\n", 2, "found a tab, which is not allowed here"),
        ("a:\tb\n", 1, "found a tab, which is not allowed here"),
        ("a: 1\nreward: rw: f\n", 2, "for a Python function, write reward: rw:f"),
        ("t: Question: {q}\n", 1, "must be quoted: write t: 'Question: {q}'"),
        ("a:\n  steps:3\n  b: 4\n", 2, "a space is missing after the colon: write steps: 3"),
        ("a:\n  b: 4\n  steps:3\n", 3, "a space is missing after the colon: write steps: 3"),
        ("a:\n  b: 4\n  steps:3\n  c: 5\n", 3, "a space is missing after the colon: write steps: 3"),
        ("a: {q} Answer:\nb: 1\n", 1, "quote the text, as in a: '{q} Answer:'"),
        ("a: [x] y\n", 1, "quote the text, as in a: '[x] y'"),
        ("uri: {{ .Values.x }}\n", 1, "a template that is not rendered: helm template CHART | rljob validate -"),
        ("{{- if .x }}\na: 1\n{{- end }}\n", 1, "a template that is not rendered"),
        ("a: {% if x %}\nb: 1\n", 1, "a template that is not rendered"),
        ("a: *.jsonl\n", 1, "*.jsonl cannot begin a string"),
        ("a: *b\n", 1, "*b cannot begin a string"),
        ("a: & b\n", 1, "& cannot begin a string"),
        ("a: %x\n", 1, "%x cannot begin a string"),
        ("a: @x\n", 1, "@x cannot begin a string"),
        ("a: !Ref x\n", 1, "!Ref cannot begin a string"),
        ("a: !!python/object:os.system x\n", 1, "!!python/object:os.system cannot begin a string"),
        ("a: >= 3\n", 1, ">= cannot begin a string"),
        ("a:\n    b: 1\n  c: 2\n", 3, "the indentation differs from that of the lines around it"),
        ("a:\n  b: 1\n    c: 2\n", 3, "the indentation differs from that of the lines around it"),
        ("a: 1\n- b\n", 2, "the indentation differs from that of the lines around it"),
        ("a: {b: 1\nc: 2\n", 1, "a { that opens here is not closed, or a comma is missing after it"),
        ("a: [1\nb: 2\n", 1, "a [ that opens here is not closed, or a comma is missing after it"),
        ("a: {b: 1 c: 2}\n", 1, "a { that opens here is not closed, or a comma is missing after it"),
        ("a: {b: 1}}\n", 1, "} closes nothing"),
        ("a: 1\nsteps\n", 2, "steps has no colon: write steps: VALUE"),
        ("steps\na: 1\n", 1, "steps has no colon: write steps: VALUE"),
        ("a: 1\nsteps = 3\nb: 2\n", 2, "expected a colon, found =: write steps: VALUE"),
        ("? [a]\n: b\n", 1, "the name of a field must be a string"),
        ("<<: 3\na: 1\n", 1, "<<: requires an alias of an object"),
        ("--- a: 1\nb: 2\n", 1, "write --- on a line of its own"),
        ("a: 1\n...\nb: 2\n", 3, "a second document must begin with a line ---"),
        ("a: 1\n<<<<<<< HEAD\nb: 2\n=======\n", 2, "found a conflict marker of git"),
        ("```yaml\na: 1\n```\n", 1, "found a Markdown code fence"),
        ("a: 1\nb: x\x07y\n", 2, "found the control character U+0007: remove it"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_correction(text: str, line: int, message: str) -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        list(read_documents(text))
    explanation, found = explain(text, caught.value)
    assert message in explanation
    assert found == line


SIGNS = ["a", ": ", ":", "- ", "{", "}", "[", "]", "'", '"', "\n", "\n  ", "\t", "*", "&", "!", "|", "%", "---\n", "\\"]


def explained(text: str) -> str | None:
    try:
        list(read_documents(text))
    except yaml.YAMLError as error:
        return explain(text, error)[0]
    return None


def test_every_error_of_the_parser_is_explained() -> None:
    """No text of a few characters with a meaning in YAML crashes the explanation."""
    for signs in itertools.product(SIGNS, repeat=3):
        assert explained(f"x: 1\n{''.join(signs)}") != ""
