"""`bench analysis`, at toy size."""

from __future__ import annotations

from bench import analysis


def test_a_step_is_analysed_beside_jit(monkeypatch):
    monkeypatch.setattr(analysis, "_QUICK_LAYERS", (1,))
    monkeypatch.setattr(analysis, "_QUICK_REPEATS", 1)
    samples = analysis.run(quick=True).samples
    names = ("analysis_over_jit", "lowering_over_jit", "analysis_us_per_leaf")
    # Of one layer: 7 of attention and norms, 4 of the rest; 4 around them; Adam's two moments of
    # each, its count and the schedule's, and the state's.
    assert list(samples) == [f"{3 * (11 + 4) + 3} leaves/{name}" for name in names]
    assert all(sample > 0 for [sample] in samples.values())
