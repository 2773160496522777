"""The answer within a response."""

from __future__ import annotations

import re

from rljob_api.task import AnswerSpec


def extract_answer(response: str, spec: AnswerSpec | None) -> str:
    """The group of the first or last match of the manifest's pattern, stripped; empty where nothing matches.

    Without a spec, the whole response, stripped.
    """
    if spec is None:
        return response.strip()
    matches = re.findall(spec.pattern, response, re.DOTALL)
    if not matches:
        return ""
    return str(matches[0] if spec.match == "First" else matches[-1]).strip()
