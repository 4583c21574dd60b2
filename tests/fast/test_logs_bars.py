"""Bars of tqdm: what a full one counted gives way to whatever counts next, its rate is over. The texts are tqdm's."""

from __future__ import annotations

import pytest

from remote_agent.logs.progress import StepReader

# datasets.map, before any training.
MAP = (
    b"\rMap:   0%|          | 0/1000 [00:00<?, ? examples/s]\rMap:  99%|#########8| 986/1000 [00:01<00:00, 553.73 "
    b"examples/s]\rMap: 100%|##########| 1000/1000 [00:01<00:00, 540.82 examples/s]\n"
)
SHARDS = b"\rLoading checkpoint shards:  50%|#####     | 1/2 [00:02<00:02,  2.70it/s]"
LOADED = b"\rLoading checkpoint shards: 100%|##########| 2/2 [00:05<00:00,  2.50it/s]"
# transformers.Trainer: its lines go above the bar, which is drawn again.
TRAINS = b"\n\r  0%|          | 0/3 [00:00<?, ?it/s]\r 33%|###3      | 1/3 [00:00<00:00, 18.96it/s]"
TRAINED = (
    b"\r100%|##########| 3/3 [00:00<00:00, 18.77it/s]\r                                             \r"
    b"{'train_runtime': 0.16, 'train_loss': 2.3, 'epoch': 1.0}\n\r100%|##########| 3/3 [00:00<00:00, 18.60it/s]\n"
)


def reported(reader: StepReader) -> tuple[int | None, object, object]:
    """Step, rate and unit."""
    figures = reader.figures.values()
    return reader.step, figures["rate"], figures["unit"]


@pytest.mark.parametrize("size", [1, 40, 10_000])
@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (MAP[:110], (986, None, None)),
        (MAP[:116], (986, 553.73, "samples/s")),
        (MAP, (1000, None, None)),
        (MAP + b"loading the model\n", (1000, None, None)),
        (MAP + SHARDS, (1, 2.7, "it/s")),
        (MAP + SHARDS + LOADED, (2, None, None)),
        (MAP + b"Epoch 1 begins\n", (1, None, None)),
        (MAP + TRAINS, (1, 18.96, "it/s")),
        (MAP + TRAINS + TRAINED, (3, None, None)),
        (b"step 7 loss 2.5 tok/s=5200\n" + MAP, (7, 5200.0, "tok/s")),
        (b"\r 50%|#####     | 1/2 [00:01<00:01,  1.02it/s, loss=2.5]" + MAP, (1000, None, None)),
    ],
)
def test_a_full_bar_has_no_rate_and_before_any_loss_gives_way_to_what_counts_next(
    size: int, text: bytes, seen: tuple[int | None, object, object]
) -> None:
    reader = StepReader()
    for at in range(0, len(text), size):
        reader.feed("stderr", text[at : at + size], at)
        reader.figures.values()
    assert reported(reader) == seen


def test_what_a_full_bar_counted_makes_no_pace() -> None:
    reader = StepReader()
    for number in range(5):
        reader.feed("stderr", b"\rMap: %d%%|#  | %d00/400 [00:01<?, ?it/s]" % (number * 25, number), number * 10**9)
    assert reader.figures.values()["steps_s"] is None
    reader.feed("stdout", b"epoch 1\n", 9 * 10**9)
    reader.feed("stdout", b"epoch 2\n", 11 * 10**9)
    assert (reader.step, reader.figures.values()["steps_s"]) == (2, 0.5)
