"""Slot values of the synthetic intent workload, in two disjoint sets: `train` and `heldout`.

Open kinds (names, places, things) come from word lists; training also invents words, so that the model learns to copy
and not a list. Counted kinds (dates, times, amounts, numbers) are built from parts and assigned to a split by a hash of
the text. No value is in both splits, and no word of the lists below.
"""

import zlib
from collections.abc import Callable
from random import Random

# Each open kind: training words, then held-out words.
_WORDS: dict[str, tuple[str, str]] = {
    "city": (
        "Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Warsaw Athens Chicago Boston Denver "
        "Seattle Dallas "
        "Toronto Sydney Tokyo Delhi Cairo Nairobi Lima Bogota Geneva Zurich Munich Hamburg Milan Naples Turin Porto",
        "Oslo Helsinki Budapest Krakow Valencia Lyon Bergen Tampere Austin Portland Montreal Vancouver Kyoto "
        "Osaka Mumbai "
        "Accra Quito Santiago Basel Leipzig Bologna Palermo Utrecht Antwerp Riga Vilnius",
    ),
    "first": (
        "Anna Peter Maria John Laura David Sarah Thomas Julia Michael Emma Daniel Sophie Paul Clara Robert Nina Simon "
        "Olga Mark Alice George Helen Victor Diana Oscar Rosa Frank Irene Louis",
        "Bruno Esther Felix Greta Hugo Ivan Jasmin Kevin Lena Martha Noah Otto Petra Quentin Ruth Stefan Tanja Ursula "
        "Walter Yusuf Zoe Amir Bianca Chloe",
    ),
    "last": (
        "Miller Smith Brown Taylor Weber Fischer Novak Silva Rossi Moreau Jensen Larsen Cohen Murphy Walsh "
        "Parker Baker "
        "Turner Cooper Morgan Hughes Foster",
        "Schneider Andersson Kowalski Ferrari Dupont Nakamura Okafor Petrov Haddad Lindgren Becker Harrison Sullivan "
        "Mendoza Castillo Bennett",
    ),
    "street": (
        "Oak Mill Church Station Bridge River Garden Castle Market School King Queen Lake Hill Forest",
        "Maple Harbor Tower Abbey Windsor Chapel Orchard Meadow Granite Willow",
    ),
    "cuisine": (
        "Italian French Indian Chinese Mexican Greek Spanish Turkish Korean German Polish Russian Persian",
        "Thai Japanese Vietnamese Lebanese Ethiopian Peruvian Moroccan Hungarian Swedish Georgian",
    ),
    "language": (
        "French German Spanish Italian Polish Russian Greek Turkish Dutch Danish Arabic Hindi Latin",
        "Portuguese Finnish Swahili Norwegian Hebrew Catalan Estonian Mandarin Welsh Bengali",
    ),
    "company": (
        "Acme Globex Initech Umbra Vertex Solaris Nordwind Bluestone Quantor Helio Medivia Tecnova Ferrum "
        "Aquila Novatel",
        "Zephyrion Kestrel Lumenta Orbitex Pinecrest Ravello Sternwerk Tidewater Uniflora Wexford Yellowfin Brightwell",
    ),
    "room": (
        "kitchen bedroom bathroom hall office cellar nursery study library lounge pantry porch",
        "attic garage hallway conservatory playroom workshop basement laundry veranda",
    ),
    "thing": (
        "milk bread butter rice onions apples cheese coffee salt sugar lemons carrots beans eggs flour honey spinach "
        "chicken salmon pepper potatoes tomatoes mushrooms noodles",
        "yogurt garlic pumpkin lentils walnuts cabbage turkey shrimp ginger parsley almonds leeks avocado broccoli "
        "raspberries",
    ),
    "quality": (
        "fresh brown green sweet white spicy dried smoked large organic cold red",
        "salted roasted yellow crispy pickled tender raw purple",
    ),
    "subject": (
        "football elections space climate robots trains whales schools oil chess medicine tennis bridges birds films "
        "taxes rivers",
        "volcanoes cycling vaccines satellites dinosaurs museums wheat sailing earthquakes batteries glaciers painting "
        "opera bees",
    ),
    "title": (
        "Silver Rain Golden Road Midnight Stars Broken River Summer Wind Lost Garden Electric Dreams Hidden "
        "Fire Winter "
        "Shadow Crystal Moon Secret Island Distant Thunder",
        "Velvet Horizon Copper Lantern Frozen Harvest Scarlet Echo Wandering Comet Hollow Kingdom Burning "
        "Meridian Gentle "
        "Avalanche Marble Phantom",
    ),
    "event": (
        "meeting dinner party lesson workout lunch haircut concert wedding call class picnic",
        "seminar rehearsal breakfast barbecue checkup reunion lecture webinar",
    ),
    "role": (
        "team family dance music school office guitar birthday garden work",
        "yoga piano dentist board project swimming client choir",
    ),
    "currency": (
        "dollars euros pounds yen francs rupees pesos kronor",
        "zloty forints lira rand shekels dinars",
    ),
    "subjectword": (
        "dinner school father train mother parcel house doctor game car sister lesson",
        "bus meal brother plumber festival boat printer neighbour cousin laptop",
    ),
}
_STATES = (
    ("late", "ready", "here", "cancelled", "broken", "sick", "gone", "fine", "at home", "on the way", "not open"),
    ("delayed", "finished", "upstairs", "postponed", "tired", "repaired", "outside", "already sold", "almost done"),
)
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ONSETS = (
    *("b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v"),
    *("w", "z", "br", "ch", "cl", "dr", "fl", "gr", "kr", "pl", "pr", "sh", "sl", "st", "th", "tr"),
)
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ou")
_CODAS = ("", "", "", "n", "r", "l", "s", "t", "m", "k", "nd", "rt", "ck", "st")
_HELDOUT_WORDS = frozenset(word.lower() for _, heldout in _WORDS.values() for word in heldout.split())
_COMMON_WORDS = (
    "play call room house book light time day way out up down in on off over under work week end side line land man "
    "some thing ever day home back hand water air port post foot head sun moon star rain snow wind fire wood stone son "
    "ing er est ed ly ness ment tion ial ish ies es ous"
)
_TRAIN_WORDS = sorted({*_COMMON_WORDS.split(), *(w.lower() for train, _ in _WORDS.values() for w in train.split())})
_LETTERS = "aabcdeefghiijklmnoopqrstuuvwxyz"
_INVENTED_SHARE = 0.65


def draw_value(kind: str, split: str, rng: Random) -> str:
    """Return a value of `kind` in `split` ("train" or "heldout"), written as in a sentence."""
    if kind in _COUNTED:
        while True:
            value = _COUNTED[kind](rng)
            if split_of(value) == split:
                return value
    return _OPEN[kind](split, rng)


def split_of(value: str) -> str:
    """Return the split of a counted value (a date, a time, a sum, a number): one in five is held out."""
    return "heldout" if zlib.crc32(value.encode()) % 5 == 0 else "train"


def is_adverb(value: str) -> bool:
    """Return whether a date or time takes no preposition, as "tomorrow" and "in 3 days" do."""
    return value.split()[0] in ("tomorrow", "next", "this", "in")


def _word(kind: str, split: str, rng: Random) -> str:
    train, heldout = _WORDS[kind]
    if split == "heldout":
        return rng.choice(heldout.split())
    if rng.random() >= _INVENTED_SHARE:
        return rng.choice(train.split())
    word = _invent(rng)
    return word.capitalize() if train[0].isupper() else word


def _invent(rng: Random) -> str:
    """Return a word in no held-out list: random syllables or letters, or parts of two known words."""
    while True:
        form = rng.random()
        head, tail = rng.choice(_TRAIN_WORDS), rng.choice(_TRAIN_WORDS)
        if form < 0.3:
            word = head[: rng.randint(2, 4)] + tail[-rng.randint(2, 4) :]
        elif form < 0.5:
            word = head[:6] + tail[:6]
        elif form < 0.6:
            word = "".join(rng.choices(_LETTERS, k=rng.randint(3, 7)))
        else:
            word = "".join(
                rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2)))
            )
        if len(word) > 2 and word not in _HELDOUT_WORDS:
            return word


def _person(split: str, rng: Random) -> str:
    first = _word("first", split, rng)
    return first if rng.random() < 0.5 else f"{first} {_word('last', split, rng)}"


def _street(split: str, rng: Random) -> str:
    name = f"{_word('street', split, rng)} {rng.choice(('Street', 'Road', 'Square', 'Park', 'Lane'))}"
    return f"{rng.randint(1, 99)} {name}" if rng.random() < 0.3 else name


def _item(split: str, rng: Random) -> str:
    thing = _word("thing", split, rng)
    return thing if rng.random() < 0.5 else f"{_word('quality', split, rng)} {thing}"


def _title(split: str, rng: Random) -> str:
    return " ".join(_word("title", split, rng) for _ in range(rng.choice((1, 2, 2, 3))))


def _event(split: str, rng: Random) -> str:
    event = _word("event", split, rng)
    return event if rng.random() < 0.4 else f"{_word('role', split, rng)} {event}"


def _text(split: str, rng: Random) -> str:
    state = rng.choice(_STATES[split == "heldout"])
    return f"{rng.choice(('the', 'my', 'our'))} {_word('subjectword', split, rng)} is {state}"


def _date(rng: Random) -> str:
    form = rng.randrange(6)
    if form == 0:
        return f"{rng.choice(_MONTHS)} {rng.randint(1, 30)}"
    if form == 1:
        return f"the {_ordinal(rng.randint(1, 30))} of {rng.choice(_MONTHS)}"
    if form == 2:
        return f"{rng.choice(_DAYS)} {rng.choice(('morning', 'evening', 'afternoon', 'night'))}"
    if form == 3:
        return f"{rng.choice(('next', 'this'))} {rng.choice((*_DAYS, 'weekend', 'week', 'month'))}"
    if form == 4:
        return f"in {rng.randint(2, 30)} {rng.choice(('days', 'weeks'))}"
    return rng.choice((*_DAYS, "tomorrow", "tomorrow morning", "tomorrow evening", "tomorrow night"))


def _ordinal(day: int) -> str:
    suffix = "th" if 10 <= day % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{suffix}"


def _time(rng: Random) -> str:
    form = rng.randrange(4)
    if form == 0:
        return f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}"
    if form == 1:
        return f"{rng.randint(1, 12)}:{rng.randrange(0, 60, 5):02d} {rng.choice(('am', 'pm'))}"
    if form == 2:
        return f"{rng.randint(0, 23)}:{rng.randrange(60):02d}"
    return f"{rng.choice(('half past', 'quarter past', 'quarter to'))} {rng.randint(1, 12)}"


def _duration(rng: Random) -> str:
    unit = rng.choice(("minutes", "seconds", "hours"))
    return f"{rng.randint(2, 90)} {unit}" if rng.random() < 0.8 else f"{rng.randint(2, 9)} and a half {unit}"


_OPEN: dict[str, Callable[[str, Random], str]] = {
    "person": _person,
    "street": _street,
    "item": _item,
    "title": _title,
    "event": _event,
    "text": _text,
    "city": lambda split, rng: _word("city", split, rng),
    "cuisine": lambda split, rng: _word("cuisine", split, rng),
    "language": lambda split, rng: _word("language", split, rng),
    "company": lambda split, rng: _word("company", split, rng),
    "room": lambda split, rng: _word("room", split, rng),
    "topic": lambda split, rng: _word("subject", split, rng),
    "currency": lambda split, rng: _word("currency", split, rng),
}
_COUNTED: dict[str, Callable[[Random], str]] = {
    "date": _date,
    "time": _time,
    "duration": _duration,
    "degrees": lambda rng: f"{rng.randint(5, 40)} degrees",
    "number": lambda rng: f"{rng.randint(10_000, 999_999)}",
    "amount": lambda rng: f"{rng.randint(2, 999)} {rng.choice(('dollars', 'euros', 'pounds'))}",
}
