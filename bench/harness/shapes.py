"""Qwen3's shapes, with random weights in bfloat16: queries of `random://qwen3?…`."""

from __future__ import annotations

_COMMON = "kvHeads=8&headDim=128&vocabulary=151936&dtype=bfloat16"
SHAPES = {
    "smoke": "hidden=64&layers=2&dtype=bfloat16",
    "0.6b": f"hidden=1024&intermediate=3072&layers=28&heads=16&tied=true&{_COMMON}",
    "4b": f"hidden=2560&intermediate=9728&layers=36&heads=32&tied=true&{_COMMON}",
    "8b": f"hidden=4096&intermediate=12288&layers=36&heads=32&tied=false&{_COMMON}",
    "14b": f"hidden=5120&intermediate=17408&layers=40&heads=40&tied=false&{_COMMON}",
    "32b": f"hidden=5120&intermediate=25600&layers=64&heads=64&tied=false&{_COMMON}",
}
