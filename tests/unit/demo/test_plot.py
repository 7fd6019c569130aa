"""The picture of a run: smoothed as it says, labelled, and drawn from the learner's own file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollmesh_learner.training.plot import draw, main, smooth


def test_the_smooth_curve_is_the_mean_of_the_last_values() -> None:
    assert smooth(np.array([1.0, 3.0, 5.0, 7.0]), window=2).tolist() == [1.0, 2.0, 4.0, 6.0]
    values = np.random.default_rng(0).random(40)
    expected = [values[max(0, end - 5) : end].mean() for end in range(1, 41)]
    np.testing.assert_allclose(smooth(values), expected, rtol=1e-12)


def test_axes_are_labelled() -> None:
    steps = np.arange(1.0, 4.0)
    figure = draw(steps, np.array([0.1, 0.2, 0.4]), np.array([0.0, 1.0, 2.0]), title="a run")
    reward, age = figure.axes
    assert reward.get_ylabel() == "mean reward" and reward.get_title(loc="left") == "a run"
    assert age.get_xlabel() == "step" and "age" in age.get_ylabel()
    assert reward.get_lines()[0].get_ydata().tolist() == [0.1, 0.2, 0.4]


def test_the_file_becomes_a_picture(tmp_path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "reward": 0.1 * step, "age_mean": 1.0, "loss": 0.0} for step in (0, 1, 2, 1)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(metrics, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_run_without_a_step_has_no_picture(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="holds no step"):
        main(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
