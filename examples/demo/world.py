"""The closed world of the demo: its words, and how its people say the time. The base's text and the task share it."""

from __future__ import annotations

NAMES = [
    "Ada",
    "Amir",
    "Anna",
    "Arun",
    "Bella",
    "Boris",
    "Carl",
    "Clara",
    "Dana",
    "David",
    "Ella",
    "Emil",
    "Eva",
    "Felix",
    "Gita",
    "Greta",
    "Hugo",
    "Igor",
    "Iris",
    "Jack",
    "Julia",
    "Karim",
    "Lara",
    "Leo",
    "Maria",
    "Max",
    "Mina",
    "Noah",
    "Olga",
    "Oscar",
    "Petra",
    "Rosa",
    "Sami",
    "Sara",
    "Simon",
    "Tara",
    "Tom",
    "Vera",
    "Yusuf",
    "Zoe",
]

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

EVENTS = [
    "meeting",
    "call",
    "lesson",
    "lunch",
    "dinner",
    "walk",
    "concert",
    "game",
    "party",
    "visit",
    "rehearsal",
    "picnic",
]

PLACES = [
    "library",
    "kitchen",
    "garden",
    "office",
    "park",
    "school",
    "museum",
    "station",
    "market",
    "theatre",
    "harbour",
    "cafe",
]

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]

CLOCK_TIMES = [
    (hour, minute) for hour in range(7, 22) if hour != 12 for minute in (0, 15, 30, 45)
]  # 12 is left out: "twelve o'clock in the afternoon" is not how anyone says it


def say_time(hour: int, minute: int) -> str:
    """Say a time of day in words: `say_time(15, 30)` is "half past three in the afternoon"."""
    period = "morning" if hour < 12 else "afternoon" if hour < 18 else "evening"
    this_hour, next_hour = NUMBERS[(hour - 1) % 12], NUMBERS[hour % 12]
    spoken = {
        0: f"{this_hour} o'clock",
        15: f"quarter past {this_hour}",
        30: f"half past {this_hour}",
        45: f"quarter to {next_hour}",
    }[minute]
    return f"{spoken} in the {period}"


def write_time(hour: int, minute: int) -> str:
    """Write a time of day in digits: `write_time(9, 0)` is "09:00"."""
    return f"{hour:02d}:{minute:02d}"
