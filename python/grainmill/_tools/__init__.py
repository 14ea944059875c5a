"""The commands of `grainmill`, one file each; nothing of it is imported by `import grainmill`."""
