#!/usr/bin/env python3
"""Computes the expected output of `reviews report --json` after an import of FILE, without Kinora. For each product
and author, the line with the latest time counts, and the first of several.   expected.py FILE > expected.json"""
import gzip, json, sys

def once(pairs):
    if len({k for k, _ in pairs}) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)

def refuse(constant):
    raise ValueError("NaN and Infinity are not valid JSON")

def parse(line):
    if len(line.rstrip(b"\r\n")) > 4 << 20:
        raise ValueError("long")
    r = json.loads(line.decode(), object_pairs_hook=once, parse_constant=refuse)
    json.dumps(r, ensure_ascii=False).encode()  # an unpaired surrogate raises UnicodeEncodeError
    p, a, s, t = r["asin"], r["reviewerID"], r["overall"], r["unixReviewTime"]
    summary, text = ("" if r.get(f) is None else r[f] for f in ("summary", "reviewText"))
    stream = "review-" + "-".join(x.replace("~", "~~").replace("-", "~-") for x in (p, a))
    if (not p or not a or len(stream.encode()) > 255 or any(c < " " or c == "\x7f" for c in stream)
            or isinstance(s, bool) or s not in (1, 2, 3, 4, 5) or type(t) is not int or not 0 <= t <= 253402300799
            or len(summary.encode()) > 4 << 10 or len(text.encode()) > 128 << 10 or "\0" in summary + text):
        raise ValueError("not a review")
    return (p, a), t, int(s)

with open(sys.argv[1], "rb") as f:
    zipped = f.read(2) == b"\x1f\x8b"
reviews, good, bad = {}, 0, 0
with (gzip.open if zipped else open)(sys.argv[1], "rb") as f:
    for line in f:
        if not line.strip():
            continue
        try:
            key, t, stars = parse(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            bad += 1
            continue
        good += 1
        if key not in reviews or t > reviews[key][0]:
            reviews[key] = (t, stars)
ratings = {}
for (product, _), (_, stars) in reviews.items():
    n, total = ratings.get(product, (0, 0))
    ratings[product] = (n + 1, total + stars)
json.dump([{"product": p, "reviews": n, "stars": s, "average": s / n}
           for p, (n, s) in sorted(ratings.items(), key=lambda kv: kv[0].encode())], sys.stdout)
print(f"{good} good lines, {bad} bad, {len(reviews)} reviews of {len(ratings)} products", file=sys.stderr)
