"""The way of weights out of the learner: versions, patches and anchors on disk, images in memory."""
