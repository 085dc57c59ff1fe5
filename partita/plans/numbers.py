"""The valid choices of a refusal, computed."""

_TRIED = 4096  # divisors above it are found through their partner below it


def divisors(n: int) -> list[int]:
    """The divisors of n, rising; of a huge n only those with one factor up to 4096."""
    low = [d for d in range(1, min(int(n**0.5), _TRIED) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def listed(numbers: list[int], most: int = 12) -> str:
    """[1, 2, 4, 8] -> "1, 2, 4 or 8"; a long list is cut."""
    if len(numbers) > most:
        return ", ".join(map(str, numbers[:most])) + ", …"
    texts = list(map(str, numbers))
    return f"{', '.join(texts[:-1])} or {texts[-1]}" if len(texts) > 1 else "".join(texts)


def multiples(n: int, unit: int) -> str:
    """The multiples of `unit` beside n: (33, 4) -> "32 or 36"."""
    return listed([m for m in (n // unit * unit, (n // unit + 1) * unit) if m > 0])
