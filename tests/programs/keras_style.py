"""Trains with Keras, which imports Grain itself, on each kind of dataset for several epochs."""

import json

import grain
import numpy as np

if __name__ == "__main__":  # workers import this file, too, and Keras takes seconds
    import keras
    from keras.src.utils import backend_utils, dataset_utils

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + 0.25).astype(np.float32)


class Records:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]

    def __repr__(self):
        return "Records()"


def losses(*data, epochs=3, **options):
    """The loss of each epoch, of a model that always starts with the same weights."""
    model = keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=False, run_eagerly=True)
    return model.fit(*data, epochs=epochs, shuffle=False, verbose=0, **options).history["loss"]


def in_pipeline(_):
    """Whether layers of Keras that are called here know that they run in a pipeline."""
    return backend_utils.in_grain_data_pipeline()


def split_error(dataset):
    """What Keras 3.15 says of a dataset of Grain, which it splits with torch only."""
    try:
        keras.utils.split_dataset(dataset, left_size=0.5)
    except TypeError as error:
        return str(error).partition(":")[0]
    return None


def windows_are_equal():
    """Whether a dataset that Keras makes of Grain's stages has the windows that NumPy makes."""
    ds = keras.utils.timeseries_dataset_from_array(
        X[:, 0], None, sequence_length=4, batch_size=8, format="grain"
    )
    windows = np.lib.stride_tricks.sliding_window_view(X[:, 0], 4)
    return bool(np.array_equal(np.concatenate([np.asarray(batch) for batch in ds]), windows))


def main():
    map_dataset = grain.MapDataset.source(Records()).batch(8)
    loader, with_worker = (
        grain.DataLoader(
            data_source=Records(),
            sampler=grain.samplers.IndexSampler(len(X), shuffle=False, num_epochs=1, seed=0),
            operations=[grain.transforms.Batch(8)],
            worker_count=worker_count,
        )
        for worker_count in (0, 1)
    )
    rescaled = grain.MapDataset.source(X).map(keras.layers.Rescaling(2.0))
    flags = grain.MapDataset.range(2).map(in_pipeline)
    out = {
        "arrays": losses(X, Y, batch_size=8),
        "MapDataset": losses(map_dataset),
        "IterDataset": losses(map_dataset.to_iter_dataset()),
        "DataLoader": losses(loader),
        "with a worker": losses(with_worker, epochs=1),
        "validation": losses(map_dataset, validation_data=map_dataset),
        "type": dataset_utils._get_type_spec(map_dataset) is grain.MapDataset,
        "types": [
            dataset_utils.is_grain_dataset(ds)
            for ds in (map_dataset, map_dataset.to_iter_dataset(), map_dataset.map(len), X)
        ],
        "split": split_error(map_dataset),
        "windows": windows_are_equal(),
        "rescaled": bool(np.allclose(np.asarray(rescaled[5]), 2 * X[5])),
        "in_pipeline": [*flags, *flags.to_iter_dataset().map(in_pipeline), in_pipeline(None)],
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
