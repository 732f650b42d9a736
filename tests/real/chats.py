"""Fifty conversations of different lengths and languages, with and without system prompts, with shared beginnings."""

from random import Random
from typing import Any

Chat = list[dict[str, Any]]

SYSTEMS = (
    None,
    "Answer in one short sentence.",
    "You are the night porter of a small hotel by the sea. You are polite, tired, and never invent room numbers.",
    "Du antwortest auf Deutsch. Sei höflich und kurz.",
    "You review Python code.\n\n- Point at one defect.\n- Show the repaired line.\n- Do not praise.",
)
OPENINGS = (
    "What is the capital of France?",
    "Name three rivers and the sea that each one ends in.",
    "Why does bread rise? Explain it to a child of six.",
    "Schreibe einen Satz über den Regen in Zürich.",
    "東京から大阪まで電車でどのくらいかかりますか。",
    "Напиши короткое приветствие для соседей.",
    "👋🏽 hi!! 🎉🎉 can u write a haiku about 🍜?",
    "naïve café — déjà vu… “quoted” e\u0301 é ﬁ ① \u200b|",
    "مرحبا، ما هو أكبر كوكب في المجموعة الشمسية؟",
    "def mean(xs):\n    return sum(xs) / len(xs)\n\nWhat happens with an empty list?",
    "for (int i = 0; i <= n; i++) {\n\ta[i] = i * i;\t// n elements\n}\n",
    '{"name": "Ada", "born": 1815, "tags": ["math", "poetry"], "alive": false}\n\nTurn this into a sentence.',
    "SELECT name FROM guests WHERE left_at IS NULL ORDER BY room;  -- what does this list?",
    "12 * 34 = ?",
    "A train leaves at 09:40 and takes 2 h 35 min. When does it arrive?",
    "   leading and trailing blanks   \n\n\n",
    "Translate to French: The window is open and the cat is gone.",
    "List the planets.",
)
ANSWERS = (
    "Yes.",
    "I am not sure, but I think it is the second one.",
    "Natürlich, gern! Hier ist es.",
    "```python\nprint('hello')\n```",
    "1. First\n2. Second\n3. Third",
)
FOLLOW_UPS = (
    "Say that again in other words.",
    "Are you sure? Why?",
    "Now in Spanish, please. ¿Sí?",
    "Shorter!",
    "And what about the opposite case, in which nothing is left?",
)
SENTENCES = (
    "The ferry leaves the island at seven and returns after dark.",
    "Nobody had painted the lighthouse since the year of the long winter.",
    "Its lamp turns once in twelve seconds, and the keeper counts them.",
    "In the kitchen there is a list of ships, some of which do not exist.",
    "A boy from the village carries letters up and bread down.",
    "On clear days one sees the other coast, thin as a pencil line.",
)


def chats(count: int = 50) -> list[Chat]:
    """Return the first `count` conversations; every later one of the same kind shares a beginning with earlier ones."""
    rng = Random(50)
    made: list[Chat] = []
    for number in range(count):
        system = SYSTEMS[number % len(SYSTEMS)]
        chat: Chat = [] if system is None else [{"role": "system", "content": system}]
        opening = OPENINGS[number % len(OPENINGS)]
        if number % 7 == 3:  # long: 300 to 900 tokens
            opening = " ".join(rng.choices(SENTENCES, k=rng.randrange(20, 60))) + "\n\nSum this up."
        chat.append({"role": "user", "content": opening})
        for _ in range(number % 4):
            chat.append({"role": "assistant", "content": rng.choice(ANSWERS)})
            chat.append({"role": "user", "content": rng.choice(FOLLOW_UPS)})
        made.append(chat)
    return made
