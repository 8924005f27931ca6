"""The media service, through which clients upload and download the files of a pipeline's object store."""
