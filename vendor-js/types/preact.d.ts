export function h(type: any, props: any, ...children: any[]): any;
export function render(node: any, into: Element): void;
