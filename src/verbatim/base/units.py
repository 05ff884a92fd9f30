"""Sizes for people: bytes as text."""

from __future__ import annotations


def size_text(count: int) -> str:
    """Bytes in the largest fitting binary unit.

    >>> size_text(100), size_text(1536), size_text(512 * 2**20)
    ('100 bytes', '1.5 KiB', '512 MiB')
    """
    if count < 1024:
        return f"{count} bytes"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            break
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def download_text(count: int) -> str:
    """Bytes in decimal units, as download pages and disks show them.

    >>> download_text(98_362_432), download_text(2_497_280_256), download_text(900)
    ('98 MB', '2.5 GB', '1 kB')
    """
    if count >= 1_000_000_000:
        return f"{count / 1e9:.1f} GB"
    if count >= 1_000_000:
        return f"{count / 1e6:.0f} MB"
    return f"{max(count, 1) / 1e3:.0f} kB"
