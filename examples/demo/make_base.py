"""Train the demo's base model: a small Llama, on text that this file writes.

    python examples/demo/make_base.py --output_dir examples/demo/base

The text is that of a closed world (people, days, places, times, counting): short stories, small records with a caption,
lists, times of day, and conversations in which an assistant answers in plain English. It never answers in JSON.

One thread and fixed seeds: with the pinned torch, on the same kind of processor, it writes the same files, bit for
bit. It takes ten minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from world import CLOCK_TIMES, DAYS, EVENTS, NAMES, NUMBERS, PLACES, say_time, write_time

SEED = 0
VOCABULARY_SIZE = 1152
NUM_STEPS = 3600
BATCH_SIZE = 16
LEARNING_RATE = 3e-3

BOS, EOS, PAD, USER, ASSISTANT = "<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|user|>' + message.content + eos_token }}
{%- elif message.role == 'assistant' %}{{- '<|assistant|>' }}
{%- generation %}{{- message.content + eos_token }}{%- endgeneration %}
{%- else %}{{- raise_exception('the roles are user and assistant, not ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

JOBS = [
    "baker",
    "doctor",
    "farmer",
    "painter",
    "pilot",
    "singer",
    "teacher",
    "writer",
    "gardener",
    "nurse",
    "sailor",
    "builder",
]
CITIES = [
    "Lisbon",
    "Oslo",
    "Paris",
    "Cairo",
    "Delhi",
    "Lima",
    "Quito",
    "Rome",
    "Tokyo",
    "Vienna",
    "Dublin",
    "Prague",
    "Nairobi",
    "Madrid",
    "Riga",
    "Bern",
]
ANIMALS = ["fox", "owl", "duck", "horse", "cat", "dog", "goat", "frog", "swan", "bear"]
FRUITS = ["apples", "pears", "plums", "lemons", "cherries", "oranges", "figs", "grapes"]
COLORS = ["red", "blue", "green", "yellow", "white", "black", "brown", "gray"]
MOODS = ["happy", "tired", "calm", "curious", "hungry", "cheerful", "late", "early"]


def join_words(words: list[str]) -> str:
    """Join a list as English does: "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def write_chat(*turns: str) -> str:
    """Lay out a conversation, user first, as the chat template does."""
    return "".join((USER if i % 2 == 0 else ASSISTANT) + turn + EOS for i, turn in enumerate(turns))


def draw_appointment(rng: random.Random) -> dict[str, str]:
    """Draw who meets whom, for what, where and when."""
    names = rng.sample(NAMES, 4)
    return {
        "host": names[0],
        "people": join_words(names[1 : 1 + rng.choice([1, 1, 1, 2, 2, 3])]),
        "event": rng.choice(EVENTS),
        "place": rng.choice(PLACES),
        "day": rng.choice(DAYS),
        "time": say_time(*rng.choice(CLOCK_TIMES)),
    }


def write_story(rng: random.Random) -> str:
    """A few sentences about an appointment, then what is remembered of it."""
    a = draw_appointment(rng)
    told = [
        rng.choice(
            [
                "On {day} {host} had a {event} with {people} in the {place}. It began at {time}.",
                "{host} and {people} planned a {event} for {day} at {time}. The {event} was in the {place}.",
                "There was a {event} in the {place} on {day} at {time}. {host} came with {people}.",
                "At {time} on {day} {host} went to the {place} for a {event} with {people}.",
            ]
        ),
        rng.choice(
            [
                f"{{host}} was {rng.choice(MOODS)} and brought {rng.choice(NUMBERS)} {rng.choice(FRUITS)}.",
                f"A {rng.choice(COLORS)} {rng.choice(ANIMALS)} sat near the {{place}}.",
                f"{{people}} came from {rng.choice(CITIES)}.",
            ]
        ),
    ]
    remembered = [
        "The {event} was with {people}.",
        "Everyone met in the {place}.",
        "It was a {day}.",
        "{host} remembers the {event} in the {place}.",
        "{host} saw {people} on {day} at {time}.",
        "It began at {time}.",
    ]
    return " ".join(told + rng.sample(remembered, 3)).format(**a)


def write_people(rng: random.Random) -> str:
    """Two or three people with a city and a job each, then a line of what was said, in another order."""
    names = rng.sample(NAMES, rng.choice([2, 3]))
    facts = {name: (rng.choice(CITIES), rng.choice(JOBS), rng.choice(COLORS)) for name in names}
    lines = [f"{name} is a {job} from {city} and likes {color}." for name, (city, job, color) in facts.items()]
    rng.shuffle(names)
    for name in names:
        city, job, color = facts[name]
        lines.append(rng.choice([f"{name} lives in {city}.", f"{name} is the {job}.", f"{name} wears {color}."]))
    return " ".join(lines)


def write_record(rng: random.Random) -> str:
    """One record in JSON with its caption, as a museum or a shop would keep it."""
    name, city, job = rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS)
    day, place, animal, count = rng.choice(DAYS), rng.choice(PLACES), rng.choice(ANIMALS), rng.randint(2, 60)
    names, clock = rng.sample(NAMES, rng.choice([1, 2, 3])), rng.choice(CLOCK_TIMES)
    (event, later_event), color = rng.sample(EVENTS, 2), rng.choice(COLORS)
    fruits = rng.sample(FRUITS, rng.choice([1, 2]))
    record, caption = rng.choice(
        [
            ({"name": name, "city": city, "job": job}, f"{name} is a {job} from {city}."),
            (
                {"animal": animal, "count": count, "place": place, "day": day},
                f"On {day} somebody counted {count} of them in the {place}, each a {animal}.",
            ),
            (
                {"guests": names, "table": color, "chairs": len(names)},
                f"{join_words(names)} sat at the table.",
            ),
            ({"place": place, "opens": write_time(*clock)}, f"The {place} opens at {say_time(*clock)}."),
            ({"owner": name, "pet": None}, f"{name} has no pet."),
            ({"owner": name, "pet": animal}, f"{name} has a {animal}."),
            ({"cake": color, "with": fruits}, f"{name} made a {color} cake with {join_words(fruits)}."),
            (
                {"event": event, "tickets": count, "left": rng.choice([None, count])},
                f"There were {count} tickets for the {event}.",
            ),
            (
                {"day": day, "first": event, "then": later_event, "time": write_time(*clock)},
                f"The {event} on {day} begins at {say_time(*clock)}, and after it there is a {later_event}.",
            ),
        ]
    )
    return f"{json.dumps(record)}\n{caption}" if rng.random() < 0.5 else f"{caption}\n{json.dumps(record)}"


def write_list(rng: random.Random) -> str:
    """A few words of all sorts: said again and again, or once in English and once in JSON. It teaches to copy."""
    things = [*DAYS, *EVENTS, *PLACES, *JOBS, *CITIES, *ANIMALS, *FRUITS, *COLORS]
    words = rng.sample(rng.choice([NAMES, NAMES + things]), rng.randint(2, 6))
    said, written = " ".join(words), json.dumps(words)
    chant = "Say: " + " ".join([said] * (24 // len(words))) + "."
    return rng.choice([chant, f"List: {said}.\nIn JSON: {written}", f"In JSON: {written}\nList: {said}."])


def write_clock(rng: random.Random) -> str:
    """A few times, said and written."""
    clocks = [rng.choice(CLOCK_TIMES) for _ in range(4)]
    if rng.random() < 0.5:
        return " ".join(f"At {say_time(*clock)} the clock shows {write_time(*clock)}." for clock in clocks)
    return "\n".join(f"{write_time(*clock)} is {say_time(*clock)}." for clock in clocks)


def write_question(rng: random.Random) -> str:
    """A conversation: facts and a question, answered in plain English."""
    a = draw_appointment(rng)
    clock = rng.choice(CLOCK_TIMES)
    fact = rng.choice(
        [
            "{host} has a {event} with {people} in the {place} on {day} at {time}.",
            "On {day} at {time} {host} and {people} meet in the {place} for a {event}.",
            "The {event} of {host} is on {day} in the {place}. It begins at {time}. {people} will come.",
        ]
    )
    question, answer = rng.choice(
        [
            (fact + " Where is the {event}?", "It is in the {place}."),
            (fact + " When is the {event}?", "It is on {day} at {time}."),
            (fact + " Which day is it?", "It is on {day}."),
            (fact + " Who will {host} see?", "{host} will see {people}."),
            (fact + " What is it?", "It is a {event}."),
            (f"How do I write {say_time(*clock)}?", f"You write {write_time(*clock)}."),
            (fact + " Who is {host}?", "I only know that {host} has a {event} with {people}."),
        ]
    )
    return write_chat(question.format(**a), answer.format(**a))


def write_request(rng: random.Random) -> str:
    """A conversation: somebody speaks of an appointment, and the assistant says in plain English what it heard."""
    request = rng.choice(
        [
            "Please remember my {event} with {people} in the {place} on {day} at {time}.",
            "I have a {event} on {day} at {time} with {people}, in the {place}.",
            "Can I have a {event} with {people} on {day} at {time}?",
            "{people} and I want to meet in the {place} on {day} for a {event}. At {time}, I think.",
            "Tell {people} that the {event} in the {place} begins at {time} on {day}.",
        ]
    )
    answer = rng.choice(
        [
            "Good, I will remember the {event} with {people}.",
            "Thank you. I hope that {people} will enjoy the {event} on {day}.",
            "I understand: {day} at {time}.",
            "A {event} with {people} sounds nice.",
        ]
    )
    a = draw_appointment(rng)
    return write_chat(request.format(**a), answer.format(**a))


def write_small_talk(rng: random.Random) -> str:
    """A conversation about nothing much."""
    name, day, fruit, mood = rng.choice(NAMES), rng.choice(DAYS), rng.choice(FRUITS), rng.choice(MOODS)
    return write_chat(
        *rng.choice(
            [
                (f"Do not forget the {fruit}.", f"I will not forget the {fruit}."),
                (f"I told {name} that we could go now.", f"And was {name} {mood}?"),
                (f"Let us say that I am {mood} on {day}.", f"You can be {mood} on {day} too."),
                (f"My calendar is full on {day}.", "Then we will see about another day."),
                (f"Could you put the {fruit} there?", f"I cannot carry {fruit}, but {name} will."),
                (f"{name} is {mood} now. Should I plan this?", f"Please do, and let {name} be {mood}."),
                ("I want to set the table. What is there?", f"There is a cake with {fruit}."),
            ]
        )
    )


def write_documents(rng: random.Random) -> Iterator[str]:
    """Write documents without end; the seed of `rng` decides all of them."""
    weights = {
        write_story: 4,
        write_people: 2,
        write_record: 6,
        write_list: 5,
        write_clock: 4,
        write_question: 4,
        write_request: 2,
        write_small_talk: 1,
    }
    while True:
        (write,) = rng.choices(list(weights), weights=list(weights.values()))
        text = write(rng)
        yield BOS + text + ("" if text.endswith(EOS) else EOS)


def build_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the first documents: whole words, single digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\p{L}\p{N}\s]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    documents = write_documents(rng)
    special_tokens = [PAD, BOS, EOS, USER, ASSISTANT]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((next(documents) for _ in range(20_000)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 2.4 million parameters: many thin layers, so that there is something to shard."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config)


def draw_batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[BatchEncoding]:
    """Yield batches of one document a row: beside another document, a small model is slow to learn to copy."""
    documents = write_documents(rng)
    while True:
        # Documents of about the same length share a batch, so that little of it is padding.
        pool = sorted((next(documents) for _ in range(BATCH_SIZE * 16)), key=len)
        batches = [pool[i : i + BATCH_SIZE] for i in range(0, len(pool), BATCH_SIZE)]
        rng.shuffle(batches)
        for batch in batches:
            yield tokenizer(batch, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")


def train_(model: LlamaForCausalLM, batches: Iterator[BatchEncoding]) -> None:
    """Train with AdamW, in bf16 over fp32 weights: a short warm-up, then a cosine down to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / NUM_STEPS))
    )
    start = time.monotonic()
    for step in range(1, NUM_STEPS + 1):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}/{NUM_STEPS}  loss {loss.item():.3f}  {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    """Write the text, train tokenizer and model, save both."""
    parser = argparse.ArgumentParser(description="Train the demo's base model.")
    parser.add_argument("--output_dir", type=Path, required=True)
    output_dir = parser.parse_args().output_dir

    torch.set_num_threads(1)  # the number of threads decides the order of sums, hence the bits
    tokenizer = build_tokenizer(random.Random(SEED))
    model = build_model(tokenizer)
    train_(model, draw_batches(tokenizer, random.Random(SEED + 1)))
    model.to(torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


if __name__ == "__main__":
    main()
