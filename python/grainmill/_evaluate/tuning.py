"""Every figure that was found by measuring: how large blocks are, what is ahead, who shares.

Elements, their order and states do not depend on any of them. Policies that turn measurements into
a number keep their thresholds beside the rule (`thread_policy`).
"""

from __future__ import annotations

from typing import Final

# --- blocks in the caller -----------------------------------------------------------------------

# What a block of records may hold and still be in a core's cache when its rows are copied: images
# of 150 KB, three at a time.
BLOCK_BYTES: Final = 480 << 10
# The Python around a block costs a percent of this.
CALLER_BLOCK_S: Final = 0.002
# Elements that are asked for at once at most, where no buffer says how many.
MOST_DEMANDED: Final = 1024

# --- lists that users' objects are asked for ----------------------------------------------------

# Blocks grow to so many elements however long they take, as what a call costs may not depend on how
# many it is asked for; and further where that made an element cost at most this share.
LEAST_LISTED: Final = 16
CHEAPER_SHARE: Final = 0.75
# A length that was found stays for so many blocks.
LISTS_HELD: Final = 64
# What a list of rows of a batch may hold.
LIST_BYTES: Final = 4 << 20

# --- blocks on threads --------------------------------------------------------------------------

# A thread that wakes up finds its core's cache cold and contends for the interpreter lock: blocks
# of 5 ms cost a tokenizer a fifth more than blocks of 20 ms, which cost as much as none that
# change threads.
HAND_OVER_S: Final = 0.02
# A block that changes threads leaves its core's cache anyway: fewer, larger ones cost less.
HAND_OVER_BYTES: Final = 4 * BLOCK_BYTES
# A batch up to this long is one block, whose rows are copied by the core that has computed them.
WHOLE_BATCH_S: Final = 0.05
# Whole batches ahead beyond two hold no more than this: they take little time to compute, and a
# pipeline may have a hundred parts and sixteen workers.
WHOLE_BATCHES_BYTES: Final = 16 << 20
# Batches that are as small as this together are one task, though more elements are ahead then:
# eight token rows of 8 KB cost 16 threads 1.39 times the CPU of none at 256 KiB, 1.04 times at
# 4 MiB.
SMALL_BYTES: Final = 4 << 20
SMALL_TIMES: Final = 8
# While the consumer waits for a block it looks this often whether more threads would help, and
# takes the elements of the block that are there.
LOOK_S: Final = 0.02
# Blocks that are handed out at a time: the first element does not wait for hundreds of others.
# Where records have to be waited for, so many of them are begun instead: twice as many as may be
# in flight.
MOST_AT_ONCE: Final = 16
MOST_READS_AT_ONCE: Final = 256

# --- batches that threads share -----------------------------------------------------------------

# A batch that takes longer is computed in parts; between them it may turn out that threads would
# help.
SLOW_BATCH_S: Final = 0.05
# Where there are several threads, they share batches that take longer than this (to share one
# costs some 50 us) if they would have nothing else to do, and longer than that in any case: batches
# of 4 sleeps of 10 ms came at 1,470 a second where all were shared, of 1,600 that threads can do.
SHARED_FROM_S: Final = 0.004
SHARED_ANYWAY_FROM_S: Final = 0.1
# In parts of up to so long.
SHARED_PART_S: Final = 0.01

# --- how often threads are counted anew ---------------------------------------------------------

# A function that waits is known after this long, amid its first element.
WAITS_AFTER_S: Final = 0.02
# Other decisions take a span this long, in which each thread did so many tasks (fewer while a new
# count is on trial), or the last figure.
SPAN_S: Final = 0.05
TASKS_PER_THREAD: Final = 4
TASKS_ON_TRIAL: Final = 2
LONGEST_SPAN_S: Final = 2.0

# --- tasks of worker processes ------------------------------------------------------------------

WORKER_BLOCK_S: Final = 0.005
WORKER_BLOCK_BYTES: Final = 4 << 20
# Small batches that are one task; with more, one worker has all that may be ahead.
WORKER_SMALL_BYTES: Final = 256 << 10
# All workers of a pool share so many bytes of the indices of files, as much as the main process may
# keep: 4 bytes for each chunk. What has no room there each keeps for itself, of the files read
# lately; however many workers and records there are, a host has no more than 640 MiB of them.
WORKERS_INDEX_BYTES: Final = 256 << 20
WORKERS_OWN_INDEX_BYTES: Final = 128 << 20
# All workers together keep so many bytes of decoded chunks, twice as much as the main process may:
# each comes to the same chunk by itself.
WORKERS_CHUNK_BYTES: Final = 512 << 20
# One that it is at, and the next.
TASKS_PER_WORKER: Final = 2
# Elements that come one by one: what a task costs the main process, and what each byte of an
# element costs the worker that sends it, about. As many workers get tasks as keep the main process
# busy with `prefetch_buffer_size` elements under way: when all 64 workers had tasks of 3 elements,
# an element cost 49 us of CPU, where 2 workers cost 1.6.
WORKER_TASK_S: Final = 50e-6
WORKER_BYTE_S: Final = 1e-9
LEAST_AT_WORK: Final = 2
# What an element costs is taken to be at least this share of what it cost one task before.
COST_LASTS: Final = 0.9
# Beyond those, for each of its threads where it has several: what one thread waits for keeps no
# other from going on. Where one element in 50 takes 500 ms, one task for each thread came to half
# of what four do.
TASKS_PER_WORKER_THREAD: Final = 4
# Where records have to be waited for, those of so many tasks are read at the same time.
TASKS_WHERE_FAR: Final = 16
