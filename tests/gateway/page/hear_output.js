// Measures what the page plays: `heardRun` is the most samples that followed each other without silence.
const connect = AudioNode.prototype.connect;
let analyser = null;
window.heardRun = 0;

AudioNode.prototype.connect = function (target, ...rest) {
  if (!(target instanceof AudioDestinationNode)) return connect.call(this, target, ...rest);
  if (analyser === null) {
    analyser = new AnalyserNode(target.context, { fftSize: 32768 });
    connect.call(analyser, target);
    requestAnimationFrame(measure);
  }
  return connect.call(this, analyser);
};

function measure() {
  const samples = new Float32Array(analyser.fftSize);
  analyser.getFloatTimeDomainData(samples);
  let run = 0;
  for (const sample of samples) {
    run = Math.abs(sample) > 0.01 ? run + 1 : 0;
    window.heardRun = Math.max(window.heardRun, run);
  }
  requestAnimationFrame(measure);
}
