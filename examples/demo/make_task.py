"""Write the demo's task: a request for an appointment, said in English, becomes one line of JSON.

    python examples/demo/make_task.py

No request of the test file stands in the training file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from world import CLOCK_TIMES, DAYS, EVENTS, NAMES, PLACES, say_time

SEED = 1
NUM_TRAIN_ROWS = 4800
NUM_TEST_ROWS = 160

REQUESTS = [
    "Please plan a {event} with {people}{place} on {day} at {time}.",
    "Could you set up a {event} with {people} on {day} at {time}{place}?",
    "On {day} at {time} I have a {event} with {people}{place}.",
    "Put this in my calendar: {event} with {people}{place}, {day} at {time}.",
    "I will see {people} for a {event} on {day}{place}, at {time}.",
    "Do not let me forget the {event}{place} on {day} at {time}. I told {people} that I will be there.",
    "There is a {event} on {day}{place}. It begins at {time} and {people} will come too.",
    "My {event} with {people} is on {day} now, at {time}{place}.",
    "At {time} on {day} there is a {event}{place}, and I am going with {people}.",
]


def make_row(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Draw one appointment, in two of five cases with two people."""
    people = rng.sample(NAMES, 2 if rng.random() < 0.4 else 1)
    event, day, clock = rng.choice(EVENTS), rng.choice(DAYS), rng.choice(CLOCK_TIMES)
    place = rng.choice(PLACES) if rng.random() < 0.75 else None
    request = rng.choice(REQUESTS).format(
        event=event,
        people=" and ".join(people),
        place=f" in the {place}" if place else "",
        day=day,
        time=say_time(*clock),
    )
    answer = {"event": event, "with": people, "place": place, "time": f"{(clock[0] - 1) % 12 + 1}:{clock[1]:02d}"}
    return {"messages": [{"role": "user", "content": request}, {"role": "assistant", "content": json.dumps(answer)}]}


def main() -> None:
    """Write train.jsonl and test.jsonl beside this file."""
    rng = random.Random(SEED)
    train_rows = [make_row(rng) for _ in range(NUM_TRAIN_ROWS)]
    test_rows = []
    while len(test_rows) < NUM_TEST_ROWS:
        row = make_row(rng)
        if row["messages"][0] not in (known["messages"][0] for known in train_rows):
            test_rows.append(row)
    for file_name, rows in (("train.jsonl", train_rows), ("test.jsonl", test_rows)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        Path(__file__).with_name(file_name).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
