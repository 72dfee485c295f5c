"""Where the values lie inside a torch.save: an uncompressed zip archive, possibly in the middle of a file."""

import io
import os
import zipfile
from typing import Any


def data_begin(file: int, offset: int, length: int) -> int:
    """Where in a file the values of the one tensor of a torch.save begin. Raises ValueError if they are not plain."""
    try:
        with zipfile.ZipFile(FilePart(file, offset, length)) as archive:
            records = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    except zipfile.BadZipFile as error:
        raise ValueError(f"no tensor at byte {offset} ({error})") from None
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"no plain tensor at byte {offset}")
    header = os.pread(file, 30, offset + records[0].header_offset)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return offset + records[0].header_offset + 30 + names


class FilePart(io.RawIOBase):
    """Bytes `begin` up to `begin + length` of an open file as a file of their own."""

    def __init__(self, file: int, begin: int, length: int):
        self.file, self.begin, self.length, self.position = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.position))
        count = os.preadv(self.file, [memoryview(buffer)[:count]], self.begin + self.position) if count else 0
        self.position += count
        return count
