"""The gRPC services of a stage replica: conversion between messages and domain types."""
