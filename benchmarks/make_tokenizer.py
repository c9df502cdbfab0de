"""Makes recipes/assets: a small corpus of plain sentences and a byte-level BPE tokenizer trained on
it.

The text is generated from word lists, so it is reproducible byte for byte and nobody owns its
copyright. It has grammar and recurring facts, which a model can learn within a few steps, so a
falling loss is meaningful. Run it with a Python that has the `tokenizers` package:

    python benchmarks/make_tokenizer.py recipes/assets
"""

import json
import random
import sys
from pathlib import Path

VOCABULARY = 1024
DOCUMENTS = 480
SEED = 20


def _words(text: str) -> list[str]:
    return text.split()


PEOPLE = _words("""
miller baker sailor shepherd weaver smith carpenter gardener teacher fisher hunter painter mason
tailor potter farmer doctor singer writer clerk porter soldier merchant beekeeper ferryman
woodcutter cook grandmother uncle daughter brother neighbour stranger traveller captain librarian
watchmaker glassblower
""")
ANIMALS = _words("""
fox heron goat owl badger mule swan hare otter crow donkey rooster sparrow hedgehog salmon wolf cat
dog mare calf goose lamb beetle spider swallow toad weasel pigeon
""")
THINGS = _words("""
lantern basket bucket ladder hammer kettle blanket barrel rope candle needle plough wheel bell
mirror letter ribbon drum flute hat coat boot spoon jug saddle anchor oar net chair table window
door key lock loaf cheese apple pear plum barley honey salt wool linen copper silver brick
""")
PLACES = _words("""
river hill valley harbour market forest meadow mill bridge village orchard tower cellar garden well
lake island road field stable church kitchen attic quarry marsh shore mountain crossroads
""")
QUALITIES = _words("""
old young quiet stubborn clever patient proud tired hungry careful brave lazy generous honest
gentle cold bright heavy narrow broken golden wooden green grey distant empty crooked warm
""")
ACTS = _words("""
carried mended borrowed painted counted washed followed watched repaired polished hid found sold
bought forgot dropped lifted measured traded promised guarded
""")
TIMES = _words("""
morning evening winter autumn spring summer harvest market-day midnight noon dawn dusk
""")
NUMBERS = _words("""
two three four five six seven eight nine ten twelve twenty thirty forty
""")

PATTERNS = (
    "The {q} {p} {a} the {t} near the {l}.",
    "In the {w}, the {p} {a} {n} {t}s and went to the {l}.",
    "A {q} {m} lived by the {l}, and every {w} it {a} a {t}.",
    "Whoever {a} the {t} must bring it back to the {l} before {w}.",
    "The {p} asked the {m} for a {t}, but the {m} was too {q} to answer.",
    "There were {n} {m}s in the {l}, and none of them had seen the {t}.",
    "When the {l} is {q}, the {p} waits until {w} and then lights the {t}.",
    "The {m} said to the {p}: a {q} {t} is better than {n} {q2} ones.",
)
MORALS = (
    "So the {p} learned that a {q} friend is worth more than a {q2} {t}.",
    "And that is why the {m} still keeps away from the {l}.",
    "From that {w} on, nobody {a} anything at the {l} without asking.",
)


def sentence(draw: random.Random, pattern: str) -> str:
    quality, other = draw.sample(QUALITIES, 2)
    return pattern.format(
        p=draw.choice(PEOPLE),
        m=draw.choice(ANIMALS),
        t=draw.choice(THINGS),
        l=draw.choice(PLACES),
        q=quality,
        q2=other,
        a=draw.choice(ACTS),
        w=draw.choice(TIMES),
        n=draw.choice(NUMBERS),
    )


def documents() -> list[str]:
    draw = random.Random(SEED)
    made = []
    for _ in range(DOCUMENTS):
        body = [sentence(draw, draw.choice(PATTERNS)) for _ in range(draw.randint(3, 6))]
        made.append(" ".join([*body, sentence(draw, draw.choice(MORALS))]))
    return made


def main(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = documents()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY:
        raise SystemExit(f"the corpus gives only {size} of {VOCABULARY} tokens: add words")
    tokens = sum(len(tokenizer.encode(text).ids) for text in texts)
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": True,
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{len(texts)} documents, {tokens} tokens, vocabulary {size}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
