"""Which CSS class of colour a label, a part of a step or a run has. Work has colours, waiting is grey."""

N_COLOURS = 8  # .c0 to .c7 in page.css; .w0 to .w3 are greys

WORK = {"generate": 0, "backward": 0, "score": 0, "decide": 0, "swap": 1, "snapshot": 1, "push": 1, "wait_push_s": 1,
        "optimizer": 2, "prox": 4, "checkpoint": 5, "warmup": 6, "load": 7, "start": 7, "bus": 3, "update_s": 0,
        "reference": 4, "serve": 1}  # fmt: skip
WAITS = {"idle": 0, "wait": 0, "wait_batch": 0, "wait_sampling_s": 0, "idle:prompt": 1, "idle:weights": 2,
         "idle:episode": 3, "wait_reward_s": 2}  # fmt: skip


def of_label(label: str) -> str:
    """The class of a label. Unknown ones get one by their name, always the same."""
    if label in WAITS:
        return f"w{WAITS[label]}"
    return f"c{WORK[label] if label in WORK else sum(label.encode()) % N_COLOURS}"


def of_place(place: int) -> str:
    """The class of the n-th line of a chart."""
    return f"c{place % N_COLOURS}"
