"""Words, numbers and uuids of the tasks: own lists, so that prompts are made without a network."""

from __future__ import annotations

import random
import string
import uuid

_ADJECTIVES = """
able amber ancient arctic ashen azure bitter blunt bold brave brief bright brisk broad bronze calm
careful cheap cheerful civil clean clear clever coastal cold common coral cosy crimson crisp
curious curly dainty damp daring dark deep dense distant double dry dusty eager early earnest easy
elder elegant empty equal exact faint fair famous fancy fast fierce final fine firm flat fluid
foggy foreign formal fragile frank free fresh frosty gentle giant glad golden grand grateful green
handy happy hardy harsh heavy hidden hollow honest humble icy idle jolly keen kind large late lazy
lean legal light lively local lonely long loud loyal lucky lunar magic major mellow mild misty
modern modest narrow neat nimble noble northern novel odd olive open orange outer pale patient
plain polite proud quick quiet rapid rare ready red rich robust rough round royal rural rusty sandy
secret sharp shiny short silent silver simple slender slow small smooth snowy soft solar solid
southern spare spicy square steady steep stern strong sturdy sunny sweet swift tall tame tender
thick thin tidy tiny tough urban useful vague vast velvet vivid warm western wide wild windy wise
wooden young yellow
"""
_NOUNS = """
acorn actor anchor antler apple apron arrow artist atlas attic autumn badger baker balcony ball
banjo banner barley barrel basin basket beacon beaver bell bench berry bicycle blanket blossom boat
bottle boulder bracelet branch bread breeze brick bridge broom bucket buffalo button cabin cable
camel camera candle canoe canyon captain carpet castle cavern cellar chain chair chalk cherry
chimney circus clock cloud clover coach coat cobbler coin comet compass copper cottage cousin
cradle crane cricket crown curtain cushion dancer desert diamond doctor dolphin donkey door dragon
drawer drum eagle engine envelope falcon farmer feather fence ferry fiddle field finger flag flame
flute forest fountain fox garden garlic gate ghost glacier glove goose grape guitar hammer harbor
harp hat hawk hedge helmet heron hill honey horse hotel island jacket jar jewel jungle kettle key
king kitchen kite ladder lake lamp lantern lemon letter lighthouse lion lizard lobster lock magnet
mango maple marble market meadow melon mirror monkey moon mountain mushroom needle nest net nurse
oak ocean onion orchard otter owl oyster paddle painter palace parrot path peach pearl pebble
pencil pepper piano pillow pilot pirate planet plate pocket pond potato prince pumpkin puppet queen
rabbit radio raft rain raven ribbon river robin rocket roof rope rose saddle sailor salmon scarf
school shadow sheep shell ship shovel singer snail sparrow spider spoon squirrel stairs star statue
stove straw street sugar swan table tailor teacher temple thunder tiger tower train tree trumpet
tunnel turtle valley vase violin wagon wall walnut whale wheel whistle willow window wolf
"""
_HEADS = """
ash bark bay black blue boat bone book bow brass candle chalk clay cloud coal copper corn cross
dawn deer drift dust earth east fern field fire fish flint frost gold grass hail hand hawk hearth
hill horn horse iron ivy king lake lark leaf light lime mill mint moon moss night north oak ox peat
pine plum rain raven reed rock rose salt sand sea silk silver sky smoke snow spring star steel
stone storm summer sun swan thorn thunder tide timber vine wax west wheat whale wind winter wood
wool yew
"""
_TAILS = """
back band bank barn beam bed bell berry bird board bolt born bound box brand break brook bush cap
cart cave chain chest child claw cliff cloth coat comb court craft creek crest crown dale den door
down drop edge face fall farm fell fin flower fold foot ford fork front gate glass grove guard hall
harbor head helm hold hook house keeper knife knot ladder lamp land lock maker mark mast mead mill
neck nest path pond pool port post ridge ring road roof root row shade shed shell ship side smith
song spear stead stick street stream tail tower town trail tree view wagon wall ward watch way weed
well wheel wick wing worm yard
"""
ADJECTIVES, NOUNS = tuple(dict.fromkeys(_ADJECTIVES.split())), tuple(dict.fromkeys(_NOUNS.split()))
HEADS, TAILS = tuple(dict.fromkeys(_HEADS.split())), tuple(dict.fromkeys(_TAILS.split()))


def draw(rng: random.Random, kind: str) -> str:
    """Draw a value.

    Args:
        rng: source.
        kind: ``word`` (adjective-noun), ``number`` (seven digits) or ``uuid`` (version 4).
    """
    if kind == "word":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "number":
        return str(rng.randrange(10**6, 10**7))
    assert kind == "uuid", kind
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_distinct(rng: random.Random, kind: str, count: int, *, absent_from: str = "") -> list[str]:
    """Draw values that differ from each other and do not occur in a text."""
    found: dict[str, None] = {}
    while len(found) < count:
        value = draw(rng, kind)
        if value not in absent_from:
            found[value] = None
    return list(found)


def draw_letters(rng: random.Random, count: int, *, length: int, upper: bool = False) -> list[str]:
    """Draw distinct strings of random letters."""
    letters = string.ascii_uppercase if upper else string.ascii_lowercase
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(letters, k=length))] = None
    return list(found)
