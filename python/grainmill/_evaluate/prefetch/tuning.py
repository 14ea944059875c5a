"""Every constant that was found by measuring: sizes of blocks, limits on prefetching, sharing.

Elements, their order and states do not depend on any of them. Policies that turn measurements into
a number keep their thresholds beside the rule (`thread_policy`).
"""

from __future__ import annotations

from typing import Final

# --- blocks computed by the caller --------------------------------------------------------------

# The size of a block of records that still fits into a core's cache when its rows are copied:
# three images of 150 KB.
BLOCK_BYTES: Final = 480 << 10
# The Python code around a block costs one percent of this.
CALLER_BLOCK_S: Final = 0.002
# Blocks that are shorter are not timed with the CPU clock.
SHORT_BLOCK_S: Final = 0.0001
# The maximum number of elements requested at once, if no buffer size limits it.
MAX_REQUESTED: Final = 1024

# --- lists for users' `__getitems__` ------------------------------------------------------------

# Lists grow to the first length however long they take, as the cost of a call may not depend on its
# length; and further if that reduces the cost of an element to at most the second figure's share.
MIN_LIST_LEN: Final = 16
CHEAPER_SHARE: Final = 0.75
# The number of blocks for which a length that was found is kept.
LISTS_HELD: Final = 64
# The bytes of a list within a batch.
LIST_BYTES: Final = 4 << 20

# --- users' functions of blocks -----------------------------------------------------------------

# Calls that take this long count as slow: their blocks grow as the lists above do. Quick ones stay
# as long as fits into the cache.
SLOW_BLOCK_FUNCTION_S: Final = 0.001

# --- blocks computed by threads -----------------------------------------------------------------

# A woken thread starts with a cold cache and contends for the interpreter lock: blocks of 5 ms cost
# a tokenizer a fifth more than blocks of 20 ms, which cost as much as computing in the caller.
HAND_OVER_S: Final = 0.02
# Where threads take turns, they get equal shares of so many records, in turns of at least the
# second figure for a round of all, and of blocks that are no longer than a fifth of a share.
SHARED_LEN: Final = 1000
ROUND_LEN: Final = 50
# Blocks that change threads do not stay in a core's cache anyway: fewer, larger ones cost less.
HAND_OVER_BYTES: Final = 4 * BLOCK_BYTES
# A batch that takes up to this long is one block; the core that computes its rows copies them.
WHOLE_BATCH_S: Final = 0.05
# The limit on prefetched whole batches, except the first two: they are computed quickly, and a
# pipeline may have a hundred datasets and sixteen workers.
WHOLE_BATCHES_BYTES: Final = 16 << 20
# Batches that are this small together are one task, up to `SMALL_TIMES` the usual prefetch: eight
# token rows of 8 KB cost 16 threads 1.39 times the CPU of none with 256 KiB, and 1.04 times with
# 4 MiB.
SMALL_BYTES: Final = 4 << 20
SMALL_TIMES: Final = 8
# How often a waiting consumer checks whether more threads would help, and takes the elements of the
# block that are ready.
POLL_S: Final = 0.02
# The limit on blocks in flight, so that the first element does not wait for hundreds of others. On
# slow storage it is the number of reads instead: twice as many as may run at a time by default. A
# block has half of them at most, since its first element waits for its last read.
MAX_BLOCKS_IN_FLIGHT: Final = 16
MAX_READS_STARTED: Final = 256

# The default limit on reads in flight of all workers together, and the least of one worker: up to
# four workers have the default limit each.
WORKERS_READS_IN_FLIGHT: Final = 512
MIN_READS_IN_FLIGHT: Final = 16

# --- reads beyond the elements in flight ---------------------------------------------------------

# How far sources are asked to read beyond them, by the size of elements, and how much at a time:
# at 20 ms a read, 64 pages of 1 MiB are 3 GB a second. The sources have limits on memory, too.
BEYOND_BYTES: Final = 64 << 20
BEYOND_STEP_BYTES: Final = 1 << 20
BEYOND_STEP_LEN: Final = 16384
# The CPU time after which no further step begins, of all blocks that start together: the batch that
# comes next waits for it. A step of short rows takes 5 ms, and asking for them batch by batch
# took 2 s in all.
BEYOND_CPU_S: Final = 0.01

# --- batches that threads share -----------------------------------------------------------------

# A batch that takes longer is computed in parts; between them, more threads may turn out to help.
SLOW_BATCH_S: Final = 0.05
# Several threads share batches that take longer than the first figure (sharing one costs some
# 50 us) if they would be idle otherwise, and longer than the second in any case: batches of 4
# sleeps of 10 ms came at 1,470 a second when all were shared, while threads can do 1,600.
SHARED_FROM_S: Final = 0.004
SHARED_ANYWAY_FROM_S: Final = 0.1
# The duration of a part of a shared batch.
SHARED_SLICE_S: Final = 0.01

# --- how often the number of threads is adjusted ------------------------------------------------

# A function that waits is recognised after this time, during its first element.
WAITS_AFTER_S: Final = 0.02
# Other decisions are based on a span of at least this length, in which each thread ran this many
# tasks (fewer during a trial), or of the last length.
SPAN_S: Final = 0.05
TASKS_PER_THREAD: Final = 4
TASKS_ON_TRIAL: Final = 2
LONGEST_SPAN_S: Final = 2.0

# --- tasks of worker processes ------------------------------------------------------------------

WORKER_BLOCK_S: Final = 0.005
WORKER_BLOCK_BYTES: Final = 4 << 20
# The bytes of small batches in one task; larger tasks would let one worker take the whole prefetch.
WORKER_SMALL_BYTES: Final = 256 << 10
# The shared page of file indices of a pool's workers, as large as the main process may cache: 4
# bytes per chunk. Indices that do not fit are kept by each worker for itself, in memory those of
# recently read files only: all workers together may take this part of what the main process may.
# Whatever the number of workers and records, these add up to 640 MiB at most on a host.
WORKERS_INDEX_BYTES: Final = 256 << 20
WORKERS_OWN_INDEX_DIVISOR: Final = 2
# Decoded chunks cached by all workers together: twice the limit of the main process, as several
# workers decode the same chunk.
WORKERS_CHUNK_BYTES: Final = 512 << 20
# The current task of a worker, and its next.
TASKS_PER_WORKER: Final = 2
# For tasks that return no batches: about what a task costs the main process, and what each byte of
# an element costs the worker that sends it. Only as many workers get tasks as keep the main process
# busy with `prefetch_buffer_size` elements in flight: when all 64 workers had tasks of 3 elements,
# an element cost 49 us of CPU, and 1.6 us with 2 workers.
WORKER_TASK_S: Final = 50e-6
WORKER_BYTE_S: Final = 1e-9
MIN_ACTIVE_WORKERS: Final = 2
# The estimated cost of an element falls to this share from task to task at most.
COST_DECAY: Final = 0.9
# Additional tasks for each thread of a worker that has several, so that a waiting thread does not
# block the others. Where one element in 50 takes 500 ms, one task per thread gave half the rate of
# four.
TASKS_PER_WORKER_THREAD: Final = 4
# On slow storage, the records of this many tasks are read concurrently.
TASKS_ON_SLOW_STORAGE: Final = 16
